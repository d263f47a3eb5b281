"""A task as the server keeps it: its arguments, its state and its result, as JSON under the id of the message."""

from __future__ import annotations

import json
import re
from datetime import datetime
from traceback import format_exception
from typing import Any, Final

from django.conf import settings
from django.utils import timezone
from django.utils.module_loading import import_string

from rsmq.django.tasks import Task, TaskError, TaskResult, TaskResultDoesNotExist, TaskResultStatus
from rsmq.model.encoding import Binding, Encoding
from rsmq.model.kept_result import KeptResult
from rsmq.model.message import JSON

TIMES: Final = ("enqueued_at", "started_at", "finished_at", "last_attempted_at")
ID: Final = re.compile(r"[A-Za-z0-9-]{1,64}")

Record = dict[str, Any]


def checked_id(result_id: str) -> str:
    """An id that a task may have. Raises TaskResultDoesNotExist."""
    if not isinstance(result_id, str) or not ID.fullmatch(result_id):
        raise TaskResultDoesNotExist(str(result_id))
    return result_id


def write_result(result: TaskResult) -> str:
    """A result as JSON. It is also the payload of the message, so that any worker knows the task without the record."""
    task = result.task
    record: Record = {
        "id": result.id,
        "task": task.module_path,
        "queue": task.queue_name,
        "priority": task.priority,
        "run_after": written(aware(task.run_after)),
        "backend": result.backend,
        "args": result.args,
        "kwargs": result.kwargs,
        "status": result.status.value,
        "errors": [[error.exception_class_path, error.traceback] for error in result.errors],
        "worker_ids": result.worker_ids,
        "return_value": result._return_value,
    }
    record |= {name: written(getattr(result, name)) for name in TIMES}
    return json.dumps(record)


def seal_result(encoding: Encoding, result_id: str, text: str) -> str | bytes:
    """A result as it is kept: compressed or encrypted as the codecs say, behind a line that says how."""
    data, enc = encoding.encode(text.encode(), task_binding(result_id))
    return KeptResult(data, JSON, enc).write() if enc else text


def open_result(encoding: Encoding, result_id: str, kept: bytes) -> str | bytes:
    """The inverse. Raises CannotDecode where a key is missing, and Malformed."""
    if b"\n" not in kept:  # JSON without a line before it
        return kept
    found = KeptResult.read(kept)
    binding = Binding(task_binding(result_id).encode(), None, found.type.encode(), found.enc.encode())
    return encoding.undo(found.data, binding)


def task_binding(result_id: str) -> str:
    """What an encrypted result is bound to, in the place of a message id."""
    return f"task:{result_id}"


def read_result(text: str | bytes) -> TaskResult:
    """The inverse. Raises ImportError or AttributeError if this code has no such task any more."""
    record = json.loads(text)
    task: Task = import_string(record["task"])
    if not isinstance(task, Task):
        raise ImportError(f"{record['task']} is a {type(task).__name__}, not a task: decorate it with @task")
    result = TaskResult(
        task=task.using(
            priority=record["priority"], queue_name=record["queue"], backend=record["backend"],
            run_after=local(moment(record["run_after"])),
        ),
        id=record["id"],
        status=TaskResultStatus(record["status"]),
        args=record["args"],
        kwargs=record["kwargs"],
        backend=record["backend"],
        errors=[TaskError(exception_class_path=path, traceback=text) for path, text in record["errors"]],
        worker_ids=record["worker_ids"],
        **{name: moment(record[name]) for name in TIMES},
    )  # fmt: skip
    set_fields(result, _return_value=record["return_value"])
    return result


def failed(text: str | bytes, path: str, traceback: str) -> str:
    """A result as failed, also one that cannot be read. `path` is that of the error's class."""
    record = json.loads(text)
    record["status"], record["finished_at"] = TaskResultStatus.FAILED.value, written(timezone.now())
    record["errors"].append((path, traceback))
    return json.dumps(record)


def is_finished(text: str | bytes) -> bool:
    """Whether a task has ended, well or not."""
    return json.loads(text)["status"] in (TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED)


def described(error: BaseException) -> tuple[str, str]:
    """The path of an error's class, and its traceback."""
    return f"{type(error).__module__}.{type(error).__qualname__}", "".join(format_exception(error))


def set_fields(result: TaskResult, **values: Any) -> None:
    """Change fields of a result, which is frozen for users."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def written(when: datetime | None) -> str | None:
    """A time as text."""
    return None if when is None else when.isoformat()


def moment(text: str | None) -> datetime | None:
    """The inverse."""
    return None if text is None else datetime.fromisoformat(text)


def aware(when: datetime | None) -> datetime | None:
    """A time with its zone: without USE_TZ Django has none."""
    return when if when is None or timezone.is_aware(when) else timezone.make_aware(when)


def local(when: datetime | None) -> datetime | None:
    """The inverse: as this project wants times."""
    return when if when is None or settings.USE_TZ else timezone.make_naive(when)
