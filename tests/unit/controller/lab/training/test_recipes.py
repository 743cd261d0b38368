"""How policies are trained."""

import pytest

from controller.lab.training.recipes import NAMES, recipe


def test_the_plain_policy_has_the_papers_hyperparameters() -> None:
    settings, traffic = recipe("ppo-plain", 1000, 0)
    assert settings.architecture == "factorised"
    assert (settings.learning_rate, settings.discount, settings.clip) == (3e-4, 0.95, 0.2)
    assert (settings.entropy, settings.epochs, settings.requests) == (0.02, 6, 100)
    assert settings.reward_gain == 0.0
    assert settings.waiting_weight == 0.0
    assert traffic.rates == (1.0, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_has_a_recipe_with_its_seed(name: str) -> None:
    settings, traffic = recipe(name, 40, 7)
    assert (settings.episodes, settings.seed) == (40, 7)
    assert (settings.architecture == "set") == name.startswith("ppo-set")
    # What serves under any weights has to see some.
    assert (traffic.preferences > 0.0) == name.startswith("ppo-set")


def test_an_unknown_policy_has_none() -> None:
    with pytest.raises(ValueError, match="ppo-flat"):
        recipe("ppo-round", 1, 0)
