"""Ctrl-C, deferred to the end of a block in the main thread."""

import signal
import threading

import pytest

from millpond.engine.execute.interrupts import defer_sigint

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="only the main thread sets handlers"
)


@pytest.fixture(autouse=True)
def pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []

    def work():
        with defer_sigint():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_block_inside_another_leaves_the_interrupt_to_the_outer_one():
    done = []

    def work():
        with defer_sigint():
            with defer_sigint():
                signal.raise_signal(signal.SIGINT)
            done.append("the rest of the outer one")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_the_block_changes_nothing():
    with defer_sigint():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="of the block"), defer_sigint():
        raise ValueError("of the block")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_an_interrupted_block_is_the_context_of_the_interrupt():
    def work():
        with defer_sigint():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_programs_own_handler_stays():
    heard = []

    def own(number, frame):
        heard.append(number)

    signal.signal(signal.SIGINT, own)
    with defer_sigint():
        assert signal.getsignal(signal.SIGINT) is own
        signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own


def test_another_thread_leaves_the_handler_alone():
    seen = []

    def work():
        with defer_sigint():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
