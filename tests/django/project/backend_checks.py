"""Tests inside a Django project, with two workers of `manage.py`. Run by tests/django/test_backend.py."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import shop
from django.core import checks
from django.core.management import execute_from_command_line
from django.db import transaction
from django.test import override_settings
from django.utils import timezone
from settings import SERVER
from waiting import finished, wait_until

from rsmq.django.apps import check_backends
from rsmq.django.backend import BROKERS, RsmqBackend
from rsmq.django.tasks import BaseTaskBackend, TaskResultDoesNotExist, TaskResultStatus, task_backends, task_enqueued
from rsmq.errors import CannotDecode
from rsmq.redis.embedded.keeper import dies_with_us
from tests.forks import start as start_fork

HERE = Path(__file__).parent
DUMMY = f"{BaseTaskBackend.__module__.rpartition('.')[0]}.dummy.DummyBackend"
backend = task_backends["default"]


def refreshed(result):
    """The result as it is now."""
    result.refresh()
    return result


def start_default():
    """`manage.py rsmq worker`, from another directory. It ends with this process."""
    command = [sys.executable, str(HERE / "manage.py"), "rsmq", "--backend", "default", "worker"]
    return subprocess.Popen([*command, "--log-level", "error"], cwd="/", preexec_fn=dies_with_us())


def start_retrying(alias="retrying"):
    """What `manage.py rsmq --backend retrying worker` becomes: a fork, because it starts in no time."""
    target = f"rsmq.django.worker:brokers.{alias}"
    environment = {**os.environ, "RSMQ_URL": SERVER["url"], "RSMQ_PREFIX": SERVER["prefix"]}
    return start_fork("rsmq", "worker", target, "--log-level", "error", cwd=HERE, env=environment, stdout=1, stderr=2)


@pytest.fixture(scope="session", autouse=True)
def _workers():
    processes = [start_default(), start_retrying()]
    yield
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in processes] == [0, 0]


@pytest.fixture(autouse=True)
def _no_notes():
    shop.NOTES.write_text("")
    shop.RELEASED.unlink(missing_ok=True)


def notes():
    """What the tasks have noted."""
    return shop.NOTES.read_text().splitlines()


def stored():
    """How many messages the topics of the default backend hold."""
    broker = backend.broker
    keys = [broker.keys.stream("tasks.default", n) for n in range(6)]
    return sum(broker.client.execute_command("XLEN", key) for key in keys)


def test_a_task_gives_its_result():
    """Also to another process that has only the id, and to a coroutine."""
    enqueued = []
    task_enqueued.connect(lambda task_result, **_: enqueued.append(task_result.id), weak=False)
    result = shop.add.enqueue(1, b=2)
    assert enqueued == [result.id]
    assert result.status in (TaskResultStatus.READY, TaskResultStatus.RUNNING)
    assert not result.is_finished
    assert finished(result).return_value == 3
    again = shop.add.get_result(result.id)
    assert (again.status, again.return_value, again.args, again.kwargs) == ("SUCCESSFUL", 3, [1], {"b": 2})
    assert again.enqueued_at <= again.started_at <= again.finished_at
    assert (again.attempts, again.errors, len(again.worker_ids)) == (1, [], 1)
    assert again.task == shop.add


@pytest.mark.anyio
async def test_a_task_is_enqueued_and_asked_for_by_a_coroutine():
    """`aenqueue`, `arefresh` and a task that is a coroutine."""
    result = await shop.add_later.aenqueue(1, 2)
    while not result.is_finished:
        await result.arefresh()
    assert result.return_value == 3


def test_an_error_fails_the_task_and_makes_a_dead_letter():
    """With its class and its traceback; without a retry policy there is one attempt."""
    result = finished(shop.fail.enqueue())
    assert result.status == TaskResultStatus.FAILED
    [error] = result.errors
    assert error.exception_class is LookupError
    assert 'raise LookupError("no such customer")' in error.traceback
    with pytest.raises(ValueError, match="failed"):
        _ = result.return_value
    [error] = finished(shop.unserializable.enqueue()).errors
    assert error.exception_class is TypeError
    letters = backend.broker.dead_letters
    topic = backend.broker.topics.existing("tasks.default")
    wait_until(lambda: letters.count(topic, "workers") == 2, "both are dead letters")


def test_a_task_that_exits_fails_and_its_worker_goes_on():
    """`sys.exit` in a task ends the task alone."""
    result = finished(shop.leave.enqueue())
    [error] = result.errors
    assert (result.status, error.exception_class) == (TaskResultStatus.FAILED, SystemExit)
    assert error.traceback.endswith("SystemExit: the till is closed\n")
    assert finished(shop.add.enqueue(1)).worker_ids == result.worker_ids


def test_wrong_use_is_an_error_at_once():
    """A queue that the backend does not have, and a result that is asked for from another task."""
    with pytest.raises(Exception, match="Queue 'letters' is not valid for backend"):
        shop.add.using(queue_name="letters").enqueue(1)
    result = shop.add.enqueue(1)
    with pytest.raises(Exception, match="does not match"):
        shop.mail.get_result(result.id)


def test_a_retry_policy_tries_again():
    """The errors of all attempts are kept, and each attempt has its worker."""
    result = finished(shop.count.using(backend="retrying").enqueue(until=3))
    assert (result.return_value, result.attempts, len(result.errors)) == (3, 3, 2)
    result = finished(shop.count.using(backend="retrying").enqueue(until=4))
    assert (result.status, result.attempts, len(result.errors)) == ("FAILED", 3, 3)
    assert notes() == ["attempt 1", "attempt 2", "attempt 3"] * 2


def test_arguments_and_results_are_encrypted():
    """In the topic and beside it; without the key the result is not there to read."""
    retrying = task_backends["retrying"]
    broker = retrying.broker
    result = finished(shop.add.using(backend="retrying").enqueue("call 010-1234 ", "or 010-9876"))
    assert result.return_value == "call 010-1234 or 010-9876"
    kept = broker.client.execute_command("GET", broker.keys.task(result.id))
    assert kept.startswith(b'{"type": "application/json", "enc": "a256gcm=k1"}\n')
    streams = [broker.keys.stream("retrying.default", n) for n in range(6)]
    entries = [fields for key in streams for _, fields in broker.client.execute_command("XRANGE", key, "-", "+")]
    assert entries
    assert not any(b"010-" in part for fields in [[kept], *entries] for part in fields)
    other = RsmqBackend("other", {"OPTIONS": {**SERVER, "topic": "retrying"}})
    with pytest.raises(CannotDecode, match="needs the key k1"):
        other.get_result(result.id)


def test_another_queue():
    """It has topics of its own."""
    finished(shop.mail.enqueue("ada"))
    assert notes() == ["mail to ada"]


def test_run_after():
    """Not before that time; without USE_TZ it has no zone."""
    due = timezone.now() + timedelta(seconds=1)
    result = finished(shop.add.using(run_after=due).enqueue(1))
    assert result.started_at >= due - timedelta(milliseconds=1)
    assert result.task.run_after == due


def test_tasks_start_by_priority():
    """One at a time in this worker: what waits starts in the order of its priority, then of its age."""
    first = shop.wait.enqueue("first")
    wait_until(notes, "the first runs")
    results = [shop.wait.using(priority=p).enqueue(f"{p}") for p in (-50, 0, 100)]
    broker = backend.broker
    topic = broker.topics.existing("tasks.default")
    assert topic.layout.bands == ("high", "normal", "low")

    def fetched():
        groups = [broker.client.execute_command("XPENDING", broker.keys.stream(topic.name, n), "workers")[0]
                  for n in topic.numbers]  # fmt: skip
        return sum(groups) == 4

    wait_until(fetched, "the worker has fetched the others")
    shop.RELEASED.touch()
    for result in (first, *results):
        finished(result)
    assert notes() == ["first", "100", "0", "-50"]


def test_a_transaction_enqueues_at_its_commit():
    """A rollback enqueues nothing, and the option `on_commit` turns it off."""
    before = stored()
    with transaction.atomic():
        result = shop.add.enqueue(1)
        assert stored() == before
        with pytest.raises(TaskResultDoesNotExist):
            shop.add.get_result(result.id)
        at_once = shop.add.using(backend="retrying").enqueue(2)
        assert finished(at_once).return_value == 3
    assert result.enqueued_at is not None
    assert finished(result).return_value == 2
    with transaction.atomic():
        lost = shop.add.enqueue(1)
        transaction.set_rollback(True)
    assert stored() == before + 1
    with pytest.raises(TaskResultDoesNotExist):
        lost.refresh()


def test_database_connections_are_closed_after_each_task():
    """The thread of a worker begins each task without one."""
    seen = [finished(shop.query.enqueue()).return_value for _ in range(2)]
    assert seen[0][1] == seen[1][1], "it is one thread"
    assert [had_one for had_one, _ in seen] == [False, False]


def test_unknown_results():
    """An id that never was, and one that is none."""
    for wrong in ("0", "no id at all", "{x}", "x" * 65):
        with pytest.raises(TaskResultDoesNotExist):
            backend.get_result(wrong)


def test_a_task_that_the_workers_do_not_have_fails():
    """Its code was removed before it ran."""
    key = backend.broker.keys.task("gone")
    template = shop.add.enqueue(1)
    finished(template)
    text = backend.broker.client.execute_command("GET", backend.broker.keys.task(template.id))
    gone = text.replace(b"shop.add", b"shop.gone").replace(b"SUCCESSFUL", b"READY")
    backend.broker.client.execute_command("SET", key, gone, "PX", 60_000)
    backend.broker.publish("tasks.default", gone.decode(), message_id="gone")
    wait_until(lambda: b"FAILED" in backend.broker.client.execute_command("GET", key), "it has failed")
    assert b"ImportError" in backend.broker.client.execute_command("GET", key)


def test_threads_share_one_connection():
    """Django makes a backend for each thread."""
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(shop.add.enqueue, range(40)))
    assert [finished(result).return_value for result in results] == [n + 1 for n in range(40)]
    assert sum(thread.name == "rsmq-portal" for thread in threading.enumerate()) == len(BROKERS) <= 4


def test_a_killed_worker_does_not_lose_its_task():
    """Another one runs it again, and the result says so."""
    other = start_retrying()
    held = [shop.wait.using(backend="retrying").enqueue(str(n)) for n in range(12)]
    wait_until(lambda: len(set(notes())) == 4, "each of the two runs two of them")
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    shop.RELEASED.touch()
    results = [finished(result) for result in held]
    assert [result.return_value for result in results] == [str(n) for n in range(12)]
    assert sorted(result.attempts for result in results) == [1] * 10 + [2] * 2


def test_a_task_that_kills_its_workers_fails():
    """It is given up after its attempts: its result says so, and the workers that run then go on."""
    result = shop.die.using(backend="deadly").enqueue()
    endings, worker = [], start_retrying("deadly")
    while not result.is_finished and len(endings) < 9:
        has_ended = lambda each=worker: each.poll() is not None or refreshed(result).is_finished  # noqa: E731
        wait_until(has_ended, "it dies, or gives the task up")
        if worker.poll() is not None:
            endings.append(worker.wait())
            worker = start_retrying("deadly")
    assert (endings, result.status) == ([-signal.SIGKILL] * 2, TaskResultStatus.FAILED)
    assert result.finished_at is not None
    [error] = result.errors
    assert (error.exception_class.__name__, "its worker died" in error.traceback) == ("TaskGivenUp", True), error
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


def test_a_naive_time_is_local():
    """With USE_TZ off all times are."""
    with override_settings(USE_TZ=False):
        due = datetime.now() + timedelta(milliseconds=300)
        result = shop.add.using(run_after=due).enqueue(1)
    finished(result)
    assert result.started_at.timestamp() >= due.timestamp() - 0.001


MISTAKES = [
    ({"OPTIONS": {"concurency": 4}}, "TASKS['x']: unknown option 'concurency' in OPTIONS. Did you mean concurrency?"),
    ({"OPTIONS": {"result_ttl": 5}}, "result_ttl=5 is not"),
    ({"OPTIONS": {"result_ttl": "0s"}}, "result_ttl must be longer than 0"),
    ({"OPTIONS": {"concurrency": 0}}, "concurrency=0 is not a whole number of 1 or more"),
    ({"OPTIONS": {"retry": 3}}, "retry=3 is not a policy: write RetryPolicy(max_attempts=5)"),
    ({"OPTIONS": {"lease_ttl": "soon"}}, "RSMQ_LEASE_TTL"),
    ({"QUEUES": []}, "QUEUES is empty: name the queues that the workers serve"),
    ({"QUEUES": ["a queue"]}, "'tasks.a queue'"),
    ({"OPTIONS": {"codecs": "no.such"}}, "codecs='no.such' cannot be imported"),
    ({"OPTIONS": {"codecs": 7}}, "codecs=7 is no list: write [Encrypt(Keyring.from_env())]"),
    ({"OPTIONS": {"codecs": [7]}}, "7 is no codec"),
    ({"OPTIONS": {"database": "other"}}, "DATABASES has no 'other'"),
]


@pytest.mark.parametrize(("params", "text"), MISTAKES)
def test_the_system_check_finds_mistakes(params, text):
    """Each is one error that says what to write."""
    [error] = RsmqBackend("x", params).check()
    assert isinstance(error, checks.Error)
    assert text in error.msg, error.msg


def test_the_system_check_finds_what_is_not_installed():
    """The application, or the backend."""
    with override_settings(INSTALLED_APPS=[]):
        [warning] = RsmqBackend("x", {}).check()
        assert "there is no `manage.py rsmq worker`" in warning.msg
    assert check_backends() == []
    with override_settings(TASKS={"default": {"BACKEND": DUMMY}}):
        [warning] = check_backends()
        assert "TASKS has no backend of rsmq" in warning.msg
    assert [each for each in checks.run_checks() if each.id and each.id.startswith("rsmq")] == []


@pytest.mark.parametrize(
    ("tasks", "args", "code", "text"),
    [
        ({}, ["rsmq", "--backend", "other", "worker"], 1, "TASKS has no backend of rsmq with the name 'other'"),
        (
            {"OPTIONS": {"topics": "x"}}, ["rsmq", "worker"], 1,
            "unknown option 'topics' in OPTIONS. Did you mean topic?",
        ),
        ({"OPTIONS": {"topics": "x"}}, ["check"], 1, "(rsmq.E001)"),
    ],
)  # fmt: skip
def test_manage_py_says_what_to_write(tasks, args, code, text, capsys):
    """In one line where it is a command of rsmq, and without a traceback."""
    backend = {"BACKEND": "rsmq.django.RsmqBackend", **tasks}
    with override_settings(TASKS={"default": backend}), pytest.raises(SystemExit) as ended:
        execute_from_command_line(["manage.py", *args])
    printed = capsys.readouterr().err
    assert (ended.value.code, text in printed, "Traceback" in printed) == (code, True, False), printed
    assert args == ["check"] or printed.count("\n") == 1
