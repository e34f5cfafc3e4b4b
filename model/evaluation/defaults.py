"""Default options of the evaluation, which need no library."""

TEST_SPLIT = "test_2016_flickr"  # the test set of Multi30k that the literature reports
TURNS = (1, 2, 4, 6, 20)  # lengths of dialogues, as in Llama 2, and the first turn
SEED = 1_000_000  # of dialogues; differs from the seeds of training dialogues
NUM_DIALOGUES = 10  # dialogues of each condition, kind of instruction and length
