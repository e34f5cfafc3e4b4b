"""Files of the page that shows attention; `sightline.service.http.page` serves them."""
