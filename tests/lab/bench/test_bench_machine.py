from lab.bench.machine import describe


def test_a_result_names_its_machine_and_versions() -> None:
    facts = describe(allow_dirty=True)
    assert facts["cores"] >= 1
    assert {"onnxruntime", "ctranslate2"} <= facts["packages"].keys()
    assert facts["processor"]
