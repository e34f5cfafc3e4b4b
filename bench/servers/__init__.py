"""Server against server: the service and CTranslate2's, under the same client, by turns."""
