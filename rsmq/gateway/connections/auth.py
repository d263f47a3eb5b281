"""Who may connect, and what they may publish and read: password and ACL files in the formats of Mosquitto."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import ssl
import traceback
from collections.abc import Awaitable, Callable
from importlib import import_module
from inspect import isawaitable, iscoroutine
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import anyio
import anyio.to_thread

from rsmq.errors import ConfigError
from rsmq.gateway.connections.tokens import Tokens
from rsmq.gateway.options import GatewayOptions, load_certificates, tls_context
from rsmq.gateway.protocol.packet import LONGEST_NAME, ReasonCode, RefusedPacket
from rsmq.gateway.protocol.topic_filter import covers, is_valid_filter, split_share

log = logging.getLogger("rsmq.gateway")

Access = Literal["read", "write"]
Authenticate = Callable[[str, str | None, bytes | None], Awaitable[bool]]
"""Client id, user name, password."""
Authorize = Callable[[str, str | None, Access, str], bool]
"""Client id, user name, what it wants to do, topic name (or, to subscribe, topic filter)."""

CHECKS_AT_ONCE: Final = 4
MOST_REMEMBERED: Final = 1_000
TOKEN: Final = b"eyJ"
"""How a JSON Web Token begins."""
ARGON2ID: Final = "$argon2id$"
DUMMY: Final = "$7$101$AAAAAAAAAAAAAAAA$" + base64.b64encode(bytes(64)).decode()
"""What the password of an unknown user is compared with where the file has none."""


def check_password(stored: str, password: bytes) -> bool:
    """Whether a password has this hash of `mosquitto_passwd`: $argon2id$ as it says, $7$ is PBKDF2-SHA512, $6$ SHA512.

    An empty password is never right: a client without any would be let in by its hash.
    """
    if stored.startswith(ARGON2ID):
        return has_argon2id(stored, password) and password != b""
    try:
        _, kind, *rest = stored.split("$")
        if kind == "7":
            rounds, salt, wanted = int(rest[0]), base64.b64decode(rest[1]), base64.b64decode(rest[2])
            found = hashlib.pbkdf2_hmac("sha512", password, salt, rounds)
        elif kind == "6":
            salt, wanted = base64.b64decode(rest[0]), base64.b64decode(rest[1])
            found = hashlib.sha512(password + salt).digest()
        else:
            return False
    except (ValueError, IndexError):
        return False
    return hmac.compare_digest(found, wanted) and password != b""


def has_argon2id(stored: str, password: bytes) -> bool:
    """Whether a password has this hash, as Mosquitto 2.1 writes it where it is built with Argon2."""
    try:
        argon2id()(password, stored)
    except (ValueError, import_module("cryptography.exceptions").InvalidKey):
        return False
    return True


def argon2id() -> Any:
    """The function that compares a password with such a hash. Raises ConfigError where it is not installed."""
    try:
        return import_module("cryptography.hazmat.primitives.kdf.argon2").Argon2id.verify_phc_encoded
    except (ImportError, AttributeError):
        raise ConfigError("passwords of Argon2id need the extra mqtt: pip install -U 'rsmq[mqtt]'") from None


def read_passwords(path: Path) -> dict[str, str]:
    """The users of a password file and their hashes. Raises ConfigError for a line that is neither."""
    users = dict[str, str]()
    for number, line in enumerate(path.read_text("utf-8-sig").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, stored = line.strip().partition(":")
        if not name or not colon or not stored.startswith(("$6$", "$7$", ARGON2ID)):
            raise ConfigError(f"{path}:{number} is no user with a hash ($argon2id$, $7$ or $6$) of mosquitto_passwd")
        if stored.startswith(ARGON2ID):
            argon2id()
        users[name] = stored
    return users


class CallbackFailed(RefusedPacket):
    """A callback of the application has raised an error: what it was asked is not known, so its client is sent away."""

    def __init__(self, name: str, error: Exception, reason: ReasonCode) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        line = f"{frames[-1].filename}:{frames[-1].lineno}: "
        super().__init__(reason, f"@gateway.{name} has failed: {line}{type(error).__name__}: {error}", "callback")


class AclRule(NamedTuple):
    """One line of an ACL file. `pattern`: %c is the client id, %u the user name."""

    access: str
    filter: str
    is_pattern: bool

    def filter_for(self, client: str, user: str | None) -> str | None:
        """The topic filter for one client, or None if the rule does not concern it."""
        if not self.is_pattern:
            return self.filter
        if "%u" in self.filter and user is None:
            return None
        put_in = [name for mark, name in (("%c", client), ("%u", user or "")) if mark in self.filter]
        if self.access != "deny" and any(each in name for name in put_in for each in "+#/"):
            return None  # such a name would widen the pattern, which only a refusal may be
        return self.filter.replace("%c", client).replace("%u", user or "")


def read_rules(path: Path) -> dict[str | None, list[AclRule]]:
    """The rules of an ACL file by user; those under None are for clients without one, and patterns are in each."""
    rules: dict[str | None, list[AclRule]] = {None: []}
    patterns, user = list[AclRule](), None
    for number, line in enumerate(path.read_text("utf-8-sig").splitlines(), 1):
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if not word or word.startswith("#"):
            continue
        if word == "user" and rest:
            user = rest
            rules.setdefault(user, [])
            continue
        access, _, found = rest.partition(" ")
        if access not in ("read", "write", "readwrite", "deny"):
            access, found = "readwrite", rest
        if word not in ("topic", "pattern") or not is_valid_filter(found.strip()):
            raise ConfigError(f"{path}:{number} is not understood: use user, topic or pattern")
        rule = AclRule(access, found.strip(), word == "pattern")
        (patterns if word == "pattern" else rules[user]).append(rule)
    for found_rules in rules.values():
        found_rules += patterns
    rules.setdefault("", patterns)  # users that have no rules of their own
    return rules


class Admission(NamedTuple):
    """Who has connected. `until`: when its token ends, in seconds since 1970."""

    user: str | None
    until: float | None = None


class Gatekeeper:
    """Decides who may connect and what they may do. Callbacks of the user are asked after the files."""

    def __init__(
        self,
        options: GatewayOptions,
        authenticate: Authenticate | None = None,
        authorize: Authorize | None = None,
    ) -> None:
        self._options = options
        self._authenticate = authenticate
        self._authorize = authorize
        self._users: dict[str, str] = {}
        self._rules: dict[str | None, list[AclRule]] | None = None
        self._checks = anyio.CapacityLimiter(CHECKS_AT_ONCE)
        self._tokens: Tokens | None = None
        self.encryption: ssl.SSLContext | None = None
        """The certificate of the listeners. Files that are read again are for new connections."""
        self.load()

    def load(self) -> set[str]:
        """Read the files, also again. Returns the users that are gone, or have another password, since the last time.

        A wrong file raises ConfigError, and what was read before stays.
        """
        options = self._options
        try:
            users = read_passwords(options.password_file) if options.password_file else {}
            rules = read_rules(options.acl_file) if options.acl_file else None
            tokens = None
            if options.jwt_key is not None:
                tokens = Tokens(options.jwt_key, options.jwt_audience, options.jwt_issuer)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"a file of the gateway cannot be read: {error}") from None
        if options.certificate is not None:
            encryption = tls_context(options)
            if self.encryption is None:
                self.encryption = encryption
            else:  # the listeners have the old one
                load_certificates(self.encryption, options)
        before = self._users
        self._users = users
        self._rules = rules
        self._tokens = tokens
        return {name for name, stored in before.items() if users.get(name) != stored}

    def require_some(self) -> None:
        """Raise ConfigError if nothing decides who may connect."""
        options = self._options
        if not (
            options.anonymous or options.password_file or options.jwt_key or options.client_ca or self._authenticate
        ):
            raise ConfigError(
                "no client could connect: give --password-file, --jwt-key, --client-ca, or --anonymous to let "
                "everyone in, or a callback"
            )

    @property
    def proves_names(self) -> bool:
        """Whether anything here proves user names. Then a name without a proof is no name."""
        options = self._options
        return bool(options.password_file or options.jwt_key or options.client_ca or self._authenticate)

    async def admit(self, client: str, user: str | None, password: bytes | None, named: str | None) -> Admission:
        """Who a client is. `named`: its name in its certificate, which is enough. Raises RefusedPacket.

        A client without credentials has no user. Credentials that nothing here can check are refused, unless nothing
        proves any name: then each client is who it says.
        """
        has_some = user is not None or password is not None
        until: float | None = None
        if named is not None:
            user, is_right = named, bool(named) and await self._asked(client, named, password)
        elif self._tokens is not None and password is not None and password.startswith(TOKEN):
            claims = self._tokens.check(password)
            is_right = claims is not None and user in (None, "", claims.user)
            if claims is not None and is_right:
                user, until = claims
                is_right = await self._asked(client, user, password)
        elif has_some or self._authenticate is not None:
            is_right = await self._knows(client, user, password)
        else:
            is_right = self._options.anonymous
        if not is_right:
            reason = ReasonCode.BAD_CREDENTIALS if has_some else ReasonCode.NOT_AUTHORIZED
            raise RefusedPacket(reason, "wrong or missing credentials")
        if self._options.user_as_client_id and user != client:
            whose = "a client without a user" if user is None else f"user {user!r}"
            raise RefusedPacket(ReasonCode.CLIENT_ID_NOT_VALID, f"{whose} may not have the client id {client!r}")
        return Admission(user, until)

    async def _asked(self, client: str, user: str | None, password: bytes | None) -> bool:
        if self._authenticate is None:
            return True
        try:
            with anyio.fail_after(self._options.connect_timeout.total_seconds()):
                return bool(await self._authenticate(client, user, password))
        except Exception as error:
            raise CallbackFailed("authenticate", error, ReasonCode.SERVER_UNAVAILABLE) from error

    async def _knows(self, client: str, user: str | None, password: bytes | None) -> bool:
        """Whether the password file and the callback, or one of them, say that a client is who it says."""
        if user is not None and self._options.password_file is not None:
            return await self._is_password_of(user, password) and await self._asked(client, user, password)
        if self._authenticate is not None:
            return await self._asked(client, user, password)
        return self._options.anonymous and not self.proves_names

    async def _is_password_of(self, user: str, password: bytes | None) -> bool:
        """Whether a password is right. A wrong one takes as long as an unknown user, who has a hash of the file."""
        stored = self._users.get(user)
        compared = stored or next(iter(self._users.values()), DUMMY)
        is_right = await anyio.to_thread.run_sync(check_password, compared, password or b"", limiter=self._checks)
        return is_right and stored is not None

    def allows(self, client: str, user: str | None, access: Access, topic: str) -> bool:
        """Whether a client may publish to a topic name (write), or get a message of it or subscribe to a filter.

        Raises CallbackFailed.
        """
        if topic.startswith("$SYS/") and access == "write":
            return False
        if self._rules is not None and not self._ruled(client, user, access, topic):
            return False
        if self._authorize is None:
            return True
        try:
            found: Any = self._authorize(client, user, access, topic)
            if iscoroutine(found):
                found.close()
            if isawaitable(found):
                raise TypeError("it is async, and would allow everything: write def")
        except Exception as error:
            raise CallbackFailed("authorize", error, ReasonCode.UNSPECIFIED_ERROR) from error
        return bool(found)

    def remembers(
        self, known: dict[tuple[str, str], bool], client: str, user: str | None, access: Access, topic: str
    ) -> bool:
        """`allows`, with the answers that one connection has had before."""
        found = known.get((access, topic))
        if found is None:
            found = self.allows(client, user, access, topic)
            if len(topic) <= LONGEST_NAME:
                if len(known) >= MOST_REMEMBERED:
                    known.clear()
                known[access, topic] = found
        return found

    def _ruled(self, client: str, user: str | None, access: Access, topic: str) -> bool:
        assert self._rules is not None
        rules = self._rules.get(user)
        if rules is None:
            rules = self._rules[""]
        is_allowed = False
        for rule in rules:
            found = rule.filter_for(client, user)
            if found is None:
                continue
            if not covers(found, topic):
                continue
            if rule.access == "deny":
                return False
            is_allowed = is_allowed or access in rule.access
        return is_allowed

    @property
    def checks_delivery(self) -> bool:
        """Whether a message may be withheld although its filter was allowed: a filter may be wider than a rule."""
        return self._rules is not None or self._authorize is not None

    def may_subscribe(self, client: str, user: str | None, text: str) -> bool:
        """Whether everything that a filter matches may be read."""
        return self.allows(client, user, "read", split_share(text)[1])

    def __repr__(self) -> str:
        return f"<Gatekeeper users={len(self._users)}{' acl' if self._rules is not None else ''}>"
