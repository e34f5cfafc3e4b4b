"""Default options of the evaluation, which need no library."""

TEST_SPLIT = "test_2016_flickr"  # the test set of Multi30k that the literature reports
TURNS = (2, 4, 6, 20)  # lengths of dialogues, as in Llama 2
SEED = 1_000_000  # of dialogues; differs from the seeds of training dialogues
NUM_DIALOGUES = 25  # dialogues of each kind of instruction and each length
