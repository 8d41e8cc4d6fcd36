"""The names that people may rely on."""

from pathlib import Path

import echo2p2p


def test_the_public_names_are_sorted_and_all_there():
    assert echo2p2p.__all__ == sorted(echo2p2p.__all__)
    for name in echo2p2p.__all__:
        assert getattr(echo2p2p, name) is not None


def test_every_error_has_its_documented_exit_code():
    from echo2p2p import errors

    def tree(cls):
        return {cls, *(found for child in cls.__subclasses__() for found in tree(child))}

    documented = {
        "SettingsError": 3,
        "JoinError": 4,
        "VerificationError": 5,
        "IncompatibleVersion": 6,
        "ResourceError": 7,
        "BudgetSpent": 8,
        "EngineLost": 9,
    }
    for cls in tree(errors.Echo2p2pError):
        expected = next((documented[c.__name__] for c in cls.__mro__ if c.__name__ in documented), 1)
        assert cls.exit_code == expected, cls
        assert cls.__name__ in errors.__doc__


def test_the_architecture_has_a_line_for_every_module():
    root = Path(__file__).parents[2]
    text = (root / "docs/architecture.md").read_text()
    for file in (root / "echo2p2p").rglob("*.py"):
        if file.name != "__main__.py":
            assert f"| `{file.name}` |" in text, file
