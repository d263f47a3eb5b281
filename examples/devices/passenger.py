"""The invented passengers of each departure, always the same."""

from random import Random

from rsmq.cli.demo.flight import Departure


def phone(number: int) -> str:
    """The client id of a phone."""
    return f"phone-{number:05}"


def passengers(departure: Departure, phones: int) -> list[str]:
    """The phones on board, 50 to 180 of them, at most half of all that there are."""
    chance = Random(departure.number)
    seats = min(chance.randint(50, 180), (phones + 1) // 2)
    return [phone(number) for number in chance.sample(range(phones), seats)]
