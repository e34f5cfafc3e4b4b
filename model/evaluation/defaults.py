"""Names of files that translations are evaluated on by default, which need no library."""

TEST_SPLIT = "test_2016_flickr"  # the test set of Multi30k that the literature reports
VALIDATION_SPLIT = "val"
