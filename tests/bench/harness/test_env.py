import json

from bench import __main__


def test_env_is_what_a_result_says_about_the_machine(capsys):
    assert __main__.main(["env", "--device", "cpu"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"time_utc", "commit", "dirty", "versions", "device", "gpu", "cpu"}
    assert printed["device"] == "cpu"
