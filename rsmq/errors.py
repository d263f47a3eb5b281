"""Everything rsmq raises. Each error carries what happened as fields and says in its text what to do next."""

from __future__ import annotations

from os.path import dirname, exists, join
from typing import Final

if exists(join(dirname(__file__), "rsmq.py")):  # checked here too: PyRSMQ may have overwritten our rsmq/__init__.py
    raise ImportError(
        "PyRSMQ is installed in this environment. Its import name is `rsmq` too, so its files have mixed with those of "
        "rsmq: run `pip uninstall PyRSMQ`, then `pip install --force-reinstall --no-deps rsmq`"
    )


class RsmqError(Exception):
    """The root: catch this to catch anything rsmq raises on purpose."""


class ConfigError(RsmqError):
    """A setting, a name or a handler is wrong. Raised before any message is touched."""


class OtherServer(ConfigError):
    """Another server uses the database of a service under the same prefix: each would take the other's rows."""


OTHER_LOOP: Final = (
    "the broker is connected in another event loop, and this one cannot use its connection: in other threads call "
    "publish_sync or use a SyncBroker; otherwise make a Broker for each event loop, and leave `async with broker:` "
    "before its event loop ends"
)
"""The text of a ConfigError: a call from another event loop would wait for ever."""


class BrokerError(RsmqError):
    """The server answered a command with an error."""


class BrokerUnavailable(BrokerError):
    """The server is unreachable or not ready (restart, failover, loading). The only error that is retried.

    `is_elsewhere`: the one that has answered may not be the right one any more, so what is repeated needs a new
    connection: after a managed failover the name leads to another server, and the old one closes nothing. `is_broken`:
    the connection was closed while an answer was awaited; a smaller answer may come (`PageLimit`).
    """

    is_elsewhere = False
    is_broken = False


class NotPermitted(BrokerError, ConfigError):
    """The server's ACL does not allow a command. A worker that runs goes on when it does: see `BrokerError`."""


class SlotMoving(BrokerUnavailable):
    """A slot of a cluster is moving and cannot be used for a moment. Nothing was executed; other slots work."""


class SlotMoved(SlotMoving):
    """A node of a cluster does not serve this slot. Nothing was executed: ask the node at `address`.

    With `is_ask` the slot is moving key by key: send only this command there, after ASKING.
    """

    def __init__(self, slot: int, address: tuple[str, int], *, is_ask: bool) -> None:
        super().__init__(f"slot {slot} {'is moving' if is_ask else 'has moved'} to {address[0]}:{address[1]}")
        self.slot = slot
        self.address = address
        self.is_ask = is_ask


class ScriptError(BrokerError):
    """A Lua script failed: a defect of rsmq or a foreign type under one of its keys."""


class PartitionSealed(BrokerError):
    """The stream of a partition takes no messages any more, and nothing was stored: its topic was resized.

    A publisher of rsmq reads the topic again and stores the message in the partition that follows.
    """


class GroupMissing(BrokerError):
    """A stream or its consumer group is gone (FLUSHALL, DEL): it is made again, from the start."""


class PublishUnknown(BrokerError):
    """The connection broke before the server confirmed: the message may or may not be stored.

    Publish again with ``message_id=error.message_id``: inside the dedup window it is stored once.
    """

    def __init__(self, message_id: str, topic: str) -> None:
        super().__init__(
            f"the server did not confirm message {message_id} to {topic!r}: publish it again with "
            f"message_id={message_id!r}, which stores it at most once"
        )
        self.message_id, self.topic = message_id, topic


class TopicFull(RsmqError):
    """The topic has reached its `max_length` and its policy is `reject`. Nothing was stored."""

    def __init__(self, topic: str, partition: int, max_length: int) -> None:
        super().__init__(
            f"partition {partition} of topic {topic!r} holds {max_length} unsettled messages, its max_length: let the "
            f"consumers catch up, or raise it with `rsmq topic set {topic} --max-length N`"
        )
        self.topic = topic
        self.partition = partition
        self.max_length = max_length


class BatchExists(RsmqError):
    """There is a batch of this name. A name is free again when the state of its batch is deleted."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is a batch {name!r}: give each batch a name of its own, or go on with it by resume=True. "
            f"`rsmq batch show` says what it has"
        )
        self.name = name


class BatchEnded(RsmqError):
    """The batch takes no more members: its callback has been sent, it was cancelled, or the server has lost it."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"batch {name!r} takes no more members: it has expired, was cancelled, or is not there. What was published "
            f"is handled all the same. Open a batch of another name for the rest"
        )
        self.name = name


class OwnershipError(RsmqError):
    """This member no longer owns what it tried to change. Nothing was changed."""


class StaleEpoch(OwnershipError):
    """The server or a database refused a write because the lease has a newer epoch: `epoch`, or 0 if not known."""

    def __init__(self, text: str = "", epoch: int = 0) -> None:
        super().__init__(text)
        self.epoch = epoch


class SessionTaken(OwnershipError):
    """The device has connected elsewhere: this session can read and acknowledge nothing any more."""

    def __init__(self, device: str) -> None:
        super().__init__(
            f"device {device!r} has connected elsewhere: its newest session counts, so end this one and its connection"
        )
        self.device = device


class SessionLost(OwnershipError):
    """The server has no session of the device any more: it expired or was deleted, perhaps with its letters. Or a
    failover has lost letters that this session has had.

    Seqs and packet ids may start anew, so the device must not continue on the same connection.
    """

    def __init__(self, device: str) -> None:
        super().__init__(
            f"the server has lost the session of device {device!r} (it expired, or its data was deleted), perhaps with "
            f"letters: end this session and its connection, and let the device connect again"
        )
        self.device = device


class MessageError(RsmqError):
    """One message is wrong; the others are not affected."""


class Malformed(MessageError):
    """A stream entry that cannot be read as a message: dead-lettered as `malformed`, never retried."""


class CannotDecode(MessageError):
    """A message is encoded in a way that this process cannot undo yet: it has no such key, or does not know the coding.

    Its worker holds it. `needs` says what is missing, such as `key k7`, `coding br` or the fingerprint of a `schema`.
    `subject`: the message, where a worker has tried to read it for its handler.
    """

    subject: object = None

    def __init__(self, needs: str, remedy: str) -> None:
        super().__init__(f"the payload needs the {needs}, which this process does not have: {remedy}")
        self.needs = needs

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with its text, which is made of two."""
        return _cannot_decode, (self.needs, str(self))


def _cannot_decode(needs: str, text: str) -> CannotDecode:
    error = CannotDecode(needs, "")
    error.args = (text,)
    return error


class BodyUnavailable(CannotDecode):
    """The body of a message lies in a store that does not answer. Its worker holds the message until it does."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(f"store {store}", "")
        self.args = (f"the payload lies in {store}, which does not answer: {problem}",)


class WrongBody(CannotDecode):
    """A store has answered with other bytes than those that were published. Its worker holds the message, and asks
    again, for as long as it would wait for a key: then it is dead-lettered as `lost-body`. `body`: its name."""

    def __init__(self, body: str) -> None:
        super().__init__("body that was published", "")
        self.args = (
            f"the body in the store is not the one that was published: its digest differs{body and f' ({body})'}",
        )
        self.body = body


class LostBody(Malformed):
    """The body of a message is in its store no more: dead-lettered as `lost-body`."""


class StoreUnavailable(BrokerUnavailable):
    """The store of large bodies does not answer, so nothing is published. Publish it again later."""


class Oversized(Malformed):
    """A stream entry beyond any publisher's limit: another client's. Its dead letter says where it is, and copies
    nothing: moving it would stall the server."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the entry has {size} bytes, more than {limit}: it stays in the stream as long as retention keeps it"
        )
        self.size, self.limit = size, limit


class TooLarge(MessageError):
    """A payload over `RSMQ_PAYLOAD_LIMIT`, as it is stored; or before it is compressed over `RSMQ_DECODED_LIMIT`.
    Refused before anything is sent."""

    def __init__(self, size: int, limit: int, setting: str = "RSMQ_PAYLOAD_LIMIT") -> None:
        super().__init__(
            f"the payload is {size} bytes, the limit {limit}: store it elsewhere and "
            + (f"publish a reference, or raise {setting}" if setting else "keep a reference")
        )
        self.size, self.limit = size, limit


class NotJson(MessageError):
    """A payload that cannot be written: NaN or infinity, which JSON does not have, an object that JSON has no form for,
    or text that is not Unicode. Refused before anything is sent. `where` is empty if it is not known."""

    def __init__(self, where: str, problem: str = "", advice: str = "") -> None:
        numbers = (
            f"the payload has NaN or infinity at {where}, and JSON has neither: publish None or a text instead, or set "
            f"ser_json_inf_nan='strings' in the model_config of a pydantic model"
        )
        forms = "publish bytes, text, or what JSON has a form for: dict, list, numbers, a dataclass or a pydantic model"
        super().__init__(f"{problem}: {advice or forms}" if problem else numbers)
        self.where = where


class RequestTimeout(RsmqError, TimeoutError):
    """No answer to a request came in time. Its message, if it was stored, is handled all the same, unless it was
    cancelled."""

    def __init__(self, topic: str, message_id: str, seconds: float) -> None:
        what = (
            f"message {message_id} to {topic!r} is stored and will be handled, unless it is cancelled"
            if message_id
            else f"a message to {topic!r} may be stored"
        )
        super().__init__(
            f"no answer within {seconds:g} s: {what}. Answers come from a handler with replies=True, in a worker that "
            f"runs"
        )
        self.topic = topic
        self.message_id = message_id
        self.seconds = seconds


class RequestFailed(RsmqError):
    """The handler of a request has failed for the last time: its message is a dead letter, with this `reason`. With the
    reason `cancelled` it was cancelled, and no handler will answer."""

    def __init__(self, topic: str, message_id: str, reason: str, error: str) -> None:
        super().__init__(
            f"message {message_id} to {topic!r} was cancelled: {error}"
            if reason == "cancelled"
            else f"message {message_id} to {topic!r} became a dead letter ({reason}): {error}. See "
            f"`rsmq dlq list {topic}`"
        )
        self.topic = topic
        self.message_id = message_id
        self.reason = reason
        self.error = error


class ResultTimeout(RsmqError, TimeoutError):
    """There is no result of a message in time: it is not handled yet, its publisher did not ask to keep one, or the
    time for which it is kept is over."""

    def __init__(self, topic: str, message_id: str, group: str, seconds: float) -> None:
        super().__init__(
            f"no result of message {message_id} of {topic!r} from group {group!r} within {seconds:g} s: it is not "
            f"handled yet, was published without keep_result, or that time is over. See "
            f"`rsmq trace {message_id} --topic {topic}`"
        )
        self.topic = topic
        self.message_id = message_id
        self.group = group
        self.seconds = seconds


class ResultFailed(RsmqError):
    """A message has ended without a result: it is a dead letter, was cancelled or has expired, with this `reason`."""

    def __init__(self, topic: str, message_id: str, group: str, reason: str, error: str) -> None:
        super().__init__(f"message {message_id} of {topic!r} has no result from group {group!r} ({reason}): {error}")
        self.topic = topic
        self.message_id = message_id
        self.group = group
        self.reason = reason
        self.error = error


class HandlerTimeout(RsmqError):
    """A handler ran longer than its `timeout`. Counts as a failed attempt."""

    def __init__(self, handler: str, seconds: float) -> None:
        super().__init__(f"handler {handler} ran longer than its timeout of {seconds:g} s")
        self.handler, self.seconds = handler, seconds
