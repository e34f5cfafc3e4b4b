"""Files of the page for browsers; `sightline.service.http.page` serves them."""
