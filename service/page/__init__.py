"""Files of the page that shows attention; `service.http.page` serves them."""
