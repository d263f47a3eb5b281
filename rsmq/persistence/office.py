"""The post office of one broker: everything about inboxes that lives as long as its connection does."""

from __future__ import annotations

import anyio
import anyio.abc

from rsmq.connect import Client
from rsmq.keys import Keys
from rsmq.persistence.courier import Courier
from rsmq.persistence.doorbell import Doorbell
from rsmq.persistence.post import Post
from rsmq.persistence.session import Session
from rsmq.settings import Settings


class PostOffice:
    """Puts letters into inboxes (`post`) and opens sessions, all over one courier and one doorbell."""

    def __init__(self, client: Client, keys: Keys, settings: Settings, gateway: str) -> None:
        self._keys, self._settings, self._gateway = keys, settings, gateway
        self._courier = Courier(client, settings)
        self._doorbell = Doorbell(client)
        self.post = Post(self._courier, keys, settings, is_cluster=client.is_cluster)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._courier.run)
            await tasks.start(self._doorbell.run)
            task_status.started()

    def connect(self, device: str, *, clean: bool, window: int, auto_ack: bool) -> Session:
        """A session, to be opened with `async with`."""
        return Session(
            self._courier, self._doorbell, self._keys, self._settings, device,
            gateway=self._gateway, clean=clean, window=window, auto_ack=auto_ack,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<PostOffice {self.post!r} {self._courier!r} {self._doorbell!r}>"
