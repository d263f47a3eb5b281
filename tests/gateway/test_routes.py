"""Routes into a band of a topic."""

from __future__ import annotations

import pytest

from rsmq.errors import ConfigError
from rsmq.gateway.fleet.routes import Routes
from rsmq.model.keys import Keys
from rsmq.model.settings import Settings
from rsmq.redis.client.connector import Connector
from rsmq.redis.topics import Topics


@pytest.mark.anyio
async def test_a_route_stores_in_its_band(connector: Connector, keys: Keys, settings: Settings) -> None:
    """Also what another gateway has noted for a band that this one does not route to: there it is `normal`."""
    routes = Routes()
    async with connector.connected() as client:
        topics = Topics(client, keys, settings)
        await topics.ensure("alarms", 2)
        await topics.set_bands("alarms", ("urgent", "normal"))
        routes.add("alarms/fire/#", "alarms", band="urgent")
        routes.add("alarms/#", "alarms")
        with pytest.raises(ConfigError, match="band="):
            routes.add("x/#", "alarms", band="No!")
        await routes.look_up(topics)
    fire, door = routes.find("alarms/fire/3"), routes.find("alarms/door/3")
    assert (fire.target, door.target) == ("alarms@urgent", "alarms")
    assert routes.target_of(fire.target).normal.numbers == range(2, 4)
    assert routes.target_of(door.target).normal.numbers == range(2)
    assert routes.target_of("alarms@later").normal.numbers == range(2)
