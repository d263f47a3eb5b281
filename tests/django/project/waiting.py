"""Waiting for a state."""

import time


def wait_until(condition, what):
    """Block until it is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.02)


def finished(result):
    """The result when the task has finished."""

    def is_finished():
        result.refresh()
        return result.is_finished

    wait_until(is_finished, f"{result.task.name} has finished: {result}")
    return result
