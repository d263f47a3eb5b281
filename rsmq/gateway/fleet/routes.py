"""Routes: the topic of rsmq in which a message of MQTT is stored, by its topic name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rsmq.errors import ConfigError
from rsmq.gateway.protocol.packet import LONGEST_NAME
from rsmq.gateway.protocol.topic_filter import is_valid_filter, matches
from rsmq.model.keys import check_name
from rsmq.model.layout import checked_band
from rsmq.redis.topics import Topic, Topics, lookup_topic

DEFAULT_TOPIC: Final = "mqtt"
MOST_CACHED: Final = 50_000


@dataclass(slots=True)
class Route:
    """Messages that a topic filter matches are stored in `topic`, in a band of it if one is named.

    `has_subscribers`: whether MQTT clients that have subscribed get it, too. `is_explicit`: the user has named it, so
    that also messages of QoS 0 are stored. `is_plain`: letters and retained messages are not encoded.
    """

    filter: str
    topic: str
    has_subscribers: bool = True
    is_explicit: bool = True
    band: str | None = None
    is_plain: bool = False

    @property
    def target(self) -> str:
        """The name of where they are stored: the topic, or `topic@band`."""
        return self.topic if self.band is None else f"{self.topic}@{self.band}"


class Routes:
    """The first route that matches counts. The last one matches everything."""

    def __init__(self) -> None:
        self._routes: list[Route] = [Route("#", DEFAULT_TOPIC, is_explicit=False)]
        self._by_name: dict[str, Route] = {}
        self._targets: dict[str, Topic] = {}

    def add(
        self, pattern: str, topic: str, *, subscribers: bool = True, band: str | None = None, is_plain: bool = False
    ) -> None:
        """Add a route behind those that were added before."""
        if not isinstance(pattern, str) or not is_valid_filter(pattern):
            raise ConfigError(f"route {pattern!r} is no topic filter: use text such as sensors/+/temperature")
        check_name("topic", topic)
        if band is not None:
            checked_band(band)
        for each in self._routes:
            if each.topic == topic and each.has_subscribers is not subscribers:
                raise ConfigError(f"the routes to topic {topic!r} disagree about subscribers")
            if each.topic == topic and each.is_plain is not is_plain:
                raise ConfigError(f"the routes to topic {topic!r} disagree about plain: give all of them the same")
        self._routes.insert(len(self._routes) - 1, Route(pattern, topic, subscribers, band=band, is_plain=is_plain))
        self._by_name.clear()

    def find(self, name: str) -> Route:
        """The route of a topic name."""
        route = self._by_name.get(name)
        if route is None:
            last = self._routes[-1]  # names that start with $ match no wildcard, but are stored all the same
            route = next((each for each in self._routes if matches(each.filter, name)), last)
            if len(name) <= LONGEST_NAME:
                if len(self._by_name) >= MOST_CACHED:
                    self._by_name.clear()
                self._by_name[name] = route
        return route

    async def look_up(self, topics: Topics) -> None:
        """Look up the topics, which creates those that do not exist."""
        for route in self._routes:
            topic = await lookup_topic(topics, route.topic)
            self._targets[route.topic] = topic
            if route.band is not None:
                self._targets[route.target] = topic.in_band(route.band)

    def target_of(self, target: str) -> Topic:
        """The topic with the partitions of a target. A band that no route of this gateway has any more is `normal`."""
        return self._targets.get(target) or self._targets[target.partition("@")[0]]

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes)

    def is_plain(self, topic: str) -> bool:
        """Whether letters of a topic are not encoded."""
        return any(each.is_plain for each in self._routes if each.topic == topic)

    def topics(self) -> list[str]:
        """The topics that subscribers get messages from."""
        return list(dict.fromkeys(route.topic for route in self._routes if route.has_subscribers))

    def __repr__(self) -> str:
        return f"<Routes {' '.join(f'{each.filter}={each.topic}' for each in self._routes)}>"
