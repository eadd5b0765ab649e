import io
import signal
import sys

import pytest

from pagedjax.cli.chat import Conversation
from pagedjax.cli.interrupts import Interrupts
from pagedjax.errors import RequestError
from pagedjax.request import SamplingParams


def roles(messages):
    return [(message["role"], message["content"]) for message in messages]


@pytest.fixture
def conversation(stub):
    conversation = Conversation(stub("m", progress=lambda done, total: None), SamplingParams())
    with conversation.interrupts.watching():
        yield conversation


def test_each_answer_sees_the_conversation(command, stub):
    code, out, _ = command("chat", "--model", "m", "--system", "Be brief.", stdin="Hello\n\nAnd then?\n")
    assert code == 0
    assert out == "Paris.\nParis.\n"  # an empty line asks nothing
    first, second = (roles(messages) for messages, _ in stub.calls)
    assert first == [("system", "Be brief."), ("user", "Hello")]
    assert second == [*first, ("assistant", "Paris."), ("user", "And then?")]


def test_reset_keeps_only_the_system_message(command, stub):
    code, out, _ = command("chat", "--model", "m", "--system", "Be brief.", stdin="Hello\n/reset\nAgain\n")
    assert code == 0
    assert "[conversation forgotten]" in out
    assert roles(stub.calls[1][0]) == [("system", "Be brief."), ("user", "Again")]


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_exit_leaves(command, stub, word):
    code, out, _ = command("chat", "--model", "m", stdin=f"{word}\nnever asked\n")
    assert (code, out, stub.calls) == (0, "", [])


def test_help_and_an_unknown_word_ask_nothing(command, stub):
    code, out, _ = command("chat", "--model", "m", stdin="/help\n/rest\n/usr/bin is a folder\n")
    assert code == 0
    assert out.count("/reset forgets the conversation") == 2
    assert "[there is no /rest]" in out
    assert roles(stub.calls[0][0]) == [("user", "/usr/bin is a folder")]


def test_options_reach_the_model(command, stub):
    code, _, _ = command("chat", "--model", "m", "--temperature", "0.5", "--seed", "3", "--max-tokens", "9", stdin="Hello\n")
    assert code == 0
    assert stub.calls[0][1] == SamplingParams(temperature=0.5, seed=3, max_tokens=9)
    assert stub.made["seed"] == 3


def test_a_model_without_a_template_is_one_line(fails, stub, monkeypatch):
    monkeypatch.setattr(stub.tokenizer, "chat_template", None)
    assert "no chat template; `pagedjax generate`" in fails("chat", "--model", "m")


def test_a_refused_message_is_reported_and_forgotten(conversation, stub, capsys):
    stub.error = RequestError("a prompt has 9000 tokens")
    conversation.answer("too long")
    assert capsys.readouterr().err == "pagedjax: error: a prompt has 9000 tokens [your message was dropped; /reset starts over]\n"
    assert conversation.messages == []
    stub.error = None
    conversation.answer("short")
    assert roles(conversation.messages) == [("user", "short"), ("assistant", "Paris.")]


def test_a_line_that_is_not_unicode_is_reported(command, stub):
    code, _, err = command("chat", "--model", "m", stdin=b"\xff\xfe\nHello\n")
    assert code == 0
    assert "the line is not valid UTF-8" in err


def test_a_terminal_shows_that_the_model_is_reading(conversation, stub, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    conversation.answer("Hello")
    assert terminal.getvalue() == "[reading ...]\r\033[KParis.\n"
    stub.error = RequestError("no")
    conversation.answer("Hello")
    assert terminal.getvalue().endswith("\n[reading ...]\r\033[K")


def test_interrupt_stops_the_answer_and_keeps_what_came(conversation, stub, capsys):
    stub.interrupt_after = 1
    conversation.answer("Hello")
    assert capsys.readouterr().out == "Paris [stopped]\n"  # the piece that was on its way is kept
    assert stub.closed_early
    assert roles(conversation.messages) == [("user", "Hello"), ("assistant", "Paris")]
    stub.interrupt_after = None
    conversation.answer("Again")
    assert roles(conversation.messages)[2:] == [("user", "Again"), ("assistant", "Paris.")]


def test_interrupt_does_not_wait_for_text(conversation, stub, capsys):
    """A dispatch that brings no whole character yields an empty piece."""
    stub.pieces, stub.interrupt_after, stub.interrupts = ("", "", "Paris"), 0, 2
    conversation.answer("Hello")
    assert capsys.readouterr().out == " [stopped]\n"
    assert stub.closed_early
    assert conversation.messages == []  # nothing came: the question is forgotten too
    stub.interrupt_after = None
    conversation.answer("Again")
    assert roles(conversation.messages) == [("user", "Again"), ("assistant", "Paris")]


def test_empty_pieces_are_not_text(conversation, stub, monkeypatch):
    stub.pieces = ("", "Paris", "", ".")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    written = []
    monkeypatch.setattr("click.echo", lambda text, nl=True: written.append(text))
    conversation.answer("Hello")
    assert written == ["[reading ...]", "\r\033[K", "Paris", ".", ""]


def test_interrupt_handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts()
    with interrupts.watching():
        assert signal.getsignal(signal.SIGINT) is not before
        with interrupts.answering() as interrupted:
            assert not interrupted()
            signal.raise_signal(signal.SIGINT)
            assert interrupted()
            signal.raise_signal(signal.SIGINT)
        with interrupts.answering() as interrupted:
            assert not interrupted()
        with pytest.raises(KeyboardInterrupt), interrupts.prompting():
            signal.raise_signal(signal.SIGINT)
        with interrupts.prompting():
            pass
        signal.raise_signal(signal.SIGINT)  # between an answer and the prompt
        with pytest.raises(KeyboardInterrupt), interrupts.prompting():
            raise AssertionError("not reached")
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_interrupt_at_the_prompt_drops_the_line(conversation, stub, capsys, monkeypatch):
    typed = iter([KeyboardInterrupt(), "Hello", EOFError()])

    def read(prompt):
        value = next(typed)
        if isinstance(value, BaseException):
            raise value
        return value

    monkeypatch.setattr("builtins.input", read)
    conversation.run(interactive=True)
    assert roles(conversation.messages) == [("user", "Hello"), ("assistant", "Paris.")]
    assert "Ctrl-D leaves" in capsys.readouterr().out
