"""Compare the service with CTranslate2 behind other servers, with the same client and in turns."""
