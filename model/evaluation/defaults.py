"""Default options of the evaluation, which need no library."""

TEST_SPLIT = "test_2016_flickr"  # the test set of Multi30k that the literature reports
TURNS = (2, 4, 6, 20)  # lengths of dialogues, as in Llama 2
SEED = 1_000_000  # of dialogues; differs from the seeds of training dialogues
OPEN_TURNS = (1, *TURNS)  # the same for instructions with open values
NUM_OPEN_DIALOGUES = 10  # the same as the next, in each condition of `model.data.open_dialogues`
NUM_DIALOGUES = 25  # dialogues of each kind of instruction and each length
