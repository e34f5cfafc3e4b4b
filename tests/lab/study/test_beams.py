from lab.study.beams import Setting, _row
from lab.study.bleu import statistics_of

GREEDY = ["ein hund rennt im gras .", "ein mann schläft dort .", "zwei mädchen spielen heute ."]
SHORTER = [*GREEDY[:2], "zwei mädchen ."]


def test_settings_are_compared_with_greedy_decoding() -> None:
    texts: dict[Setting, list[str]] = {(1, None): GREEDY, (4, 0.5): SHORTER}
    outputs = {
        setting: [{"text": line, "tokens": [{"logprob": -0.5}] * len(line.split())} for line in lines]
        for setting, lines in texts.items()
    }
    rows = {setting: statistics_of(lines, GREEDY) for setting, lines in texts.items()}
    greedy, beams = (_row(setting, rows, outputs) for setting in texts)
    assert greedy["bleu"] == [100, 100, 100] and greedy["same_text"] == 3 and greedy["gain"] == [0, 0, 0]
    assert beams["same_text"] == 2
    assert beams["gain"][0] < 0 and beams["gain"][1] <= beams["gain"][0] <= beams["gain"][2]
    assert beams["nats_gained"] == round(1 / 3, 4)  # two tokens fewer, at half a nat each
    assert beams["length_ratio"][0] == round(14 / 16, 4)
