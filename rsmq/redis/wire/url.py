"""RSMQ_URL: its forms, parsed and checked. No I/O."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit, urlunsplit

from rsmq.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
FORMS = {"db": "[0-9]{1,4}", "ssl_cert_reqs": "none|optional|required", "ssl_check_hostname": "true|false"}
"""The form of the options that are not paths."""
PLAIN = ("redis", "redis+sentinel", "redis+cluster")
"""Schemes without encryption."""
PASSWORD = re.compile(r"((?:password|passwd|token|secret)=)[^&]*", re.IGNORECASE)
LISTS = ("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
"""Schemes that may name several hosts."""
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
"""Credentials for the sentinels. The user and password of the URL are for the master."""
TLS_OPTIONS = (
    "db", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname",
)  # fmt: skip


def split_url(url: str) -> SplitResult:
    """`urlsplit`, also for a list of hosts: `urlsplit` refuses the brackets in it."""
    scheme, _, rest = url.partition("://")
    if scheme not in LISTS:
        return urlsplit(url)
    rest, _, query = rest.partition("?")
    netloc, slash, path = rest.partition("/")
    return SplitResult(scheme, netloc, slash + path, query, "")


def check_url(url: str) -> str:
    """Return the URL, its scheme in small letters, or raise ConfigError with the forms that are allowed. No error shows
    a part of a password."""
    scheme, separator, rest = url.partition("://")
    url = scheme.lower() + separator + rest
    if re.search(r"[\x00-\x1f\x7f]", url):
        raise ConfigError(f"RSMQ_URL {redact(url)!r} has a line end or a tab in it: percent-encode it, or leave it out")
    refuse_cut_password(url)
    refuse_empty_parts(url)
    try:
        parts = split_url(url)
        if is_sentinel(url):
            split_sentinel(url)
        elif is_cluster(url):
            urlsplit(node_url(url, split_cluster(url)[0]))  # checks the credentials, too
        elif parts.scheme == "unix" and not parts.path:
            raise ValueError(url)
        elif parts.scheme in ("redis", "rediss"):
            _ = parts.port, int(parts.path.strip("/") or 0)
        if "://" not in url:
            raise ValueError(url)
    except ValueError:
        parts = split_url("")
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            f"RSMQ_URL {redact(url)!r} is not understood: use redis://host:6379/0, rediss://, unix:///path/to.sock, "
            f"redis+sentinel://host1,host2/master-name, redis+cluster://host1:6379,host2, rediss+sentinel:// or "
            f"rediss+cluster://"
        )
    options_of = parse_qs(parts.query, keep_blank_values=True)
    for option in options_of:
        # redis-py would let it override what we pin: the protocol, the time-outs, the shape of replies
        if option not in (allowed := options_for(url)):
            shown = repr(option) if re.fullmatch(r"[a-z_]{1,40}", option) else "that it has"
            raise ConfigError(f"RSMQ_URL may not have the option {shown}, only {', '.join(allowed) or 'none'}")
    if "db" in options_of and parts.scheme != "unix" and database_in_path(url):
        raise ConfigError(f"RSMQ_URL {redact(url)!r} names a database twice: leave out the option `db`")
    for option, form in FORMS.items():
        for value in options_of.get(option, ()):
            if not re.fullmatch(form, value, re.ASCII):
                raise ConfigError(f"RSMQ_URL has {option}={value!r}: use {form.replace('|', ', ')}")
    return url


def refuse_cut_password(url: str) -> None:
    """Raise ConfigError where a `/`, `?` or `#` ends the part of the URL that has the password, because it is in it.

    The standard would take `redis://:12#3@host` for port 12 of this machine, and `?` would make the password an option.
    """
    scheme, _, rest = url.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    behind = PASSWORD.sub("", rest[len(authority) :])
    if scheme != "unix" and ("@" in behind or "#" in behind):
        raise ConfigError(
            f"RSMQ_URL {redact(url)!r} cannot be split into its parts: percent-encode the user and the password in it "
            f"(/ is %2F, ? is %3F, # is %23, @ is %40, : is %3A)"
        )


def refuse_empty_parts(url: str) -> None:
    """Raise ConfigError for a host, a port or a password that is empty: what a variable that was not set leaves.

    `redis://:$PASSWORD@$HOST:6379` would otherwise lead to this machine, without a password.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        return
    credentials, at, hosts = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")
    if at and (not credentials or credentials.endswith(":")):
        raise ConfigError(f"RSMQ_URL {redact(url)!r} has no password before the @: is a variable in it not set?")
    for host in hosts.split(",") if scheme != "unix" else ():
        if not host or host.startswith(":") or host.endswith(":"):
            raise ConfigError(f"RSMQ_URL {redact(url)!r} has an empty host or port: is a variable in it not set?")
        if re.search(":0+$", host):  # redis-py would take its own default
            raise ConfigError(f"RSMQ_URL {redact(url)!r} has port 0, where nothing can listen: write the server's")


def server_name(url: str) -> str:
    """Where a URL leads to, with what it leaves to the defaults, and without user and password: for logs."""
    parts = split_url(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}, database {database_of(url)}"
    hosts = [
        f"{f'[{host}]' if ':' in host else host}:{port}"
        for host, port in addresses(parts, 26379 if is_sentinel(url) else 6379)
    ]
    name = f"{parts.scheme}://{','.join(hosts)}"
    if is_cluster(url):
        return name
    if is_sentinel(url):
        name = f"{name}/{parts.path.strip('/').partition('/')[0]}"
    return f"{name}, database {database_of(url)}"


def options_for(url: str) -> list[str]:
    """The options that the query of such a URL may have."""
    options = TLS_OPTIONS if url.startswith("rediss") else ("db",)
    if is_sentinel(url):
        return [*options, *SENTINEL_OPTIONS]
    return [option for option in options if option != "db" or not is_cluster(url)]


def is_sentinel(url: str) -> bool:
    """Whether it names sentinels."""
    return url.startswith(("redis+sentinel://", "rediss+sentinel://"))


def split_sentinel(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """`redis+sentinel://user:pw@h1:26379,h2/master/0` as hosts, master name and client options."""
    parts = split_url(url)
    credentials = parts.netloc.rpartition("@")[0]
    master, _, db = parts.path.strip("/").partition("/")
    if not master:
        raise ConfigError("redis+sentinel:// needs the master's name: redis+sentinel://host1,host2/master-name")
    options: dict[str, Any] = {"db": int(db or parse_qs(parts.query).get("db", ["0"])[0])}
    if credentials:
        username, _, password = credentials.partition(":")
        options |= {"username": unquote(username) or None, "password": unquote(password)}
    return addresses(parts, 26379), master, options


def sentinel_options(url: str) -> dict[str, Any]:
    """The credentials for its sentinels as client options."""
    query = parse_qs(split_url(url).query)
    return {name.removeprefix("sentinel_"): query[name][0] for name in SENTINEL_OPTIONS if name in query}


def tls_options(url: str) -> dict[str, Any]:
    """The TLS options of a `rediss+sentinel://` URL as client options: redis-py reads those of other URLs itself."""
    query = parse_qs(split_url(url).query)
    options: dict[str, Any] = {name: query[name][0] for name in TLS_OPTIONS if name != "db" and name in query}
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = options["ssl_check_hostname"] == "true"
    return options


def database_of(url: str | None) -> int:
    """The number of the database that a URL names; 0 where it names none, and for one that `check_url` refuses."""
    if url is None or is_cluster(url):
        return 0
    try:
        parts = split_url(url)
        return int((parts.scheme != "unix" and database_in_path(url)) or parse_qs(parts.query).get("db", ["0"])[0])
    except ValueError:
        return 0


def database_in_path(url: str) -> str:
    """The part of the path that names the database, perhaps empty."""
    path = split_url(url).path.strip("/")
    return path.partition("/")[2] if is_sentinel(url) else path


def has_password(url: str) -> bool:
    """Whether it has a password, for the server or for the sentinels."""
    return bool(split_url(url).netloc.rpartition("@")[0].partition(":")[2] or sentinel_options(url).get("password"))


def is_cluster(url: str) -> bool:
    """Whether it names a cluster."""
    return url.startswith(("redis+cluster://", "rediss+cluster://"))


def split_cluster(url: str) -> list[tuple[str, int]]:
    """The seeds of `redis+cluster://user:pw@h1:7000,h2`."""
    parts = split_url(url)
    if parts.path.strip("/"):
        raise ConfigError("redis+cluster:// has no database number: a cluster has only database 0")
    return addresses(parts, 6379)


def addresses(parts: SplitResult, port: int) -> list[tuple[str, int]]:
    """Its hosts, with this port where none is given."""
    nodes = [urlsplit(f"//{host}") for host in parts.netloc.rpartition("@")[2].split(",")]
    return [(node.hostname or "localhost", node.port or port) for node in nodes]


def refuse_plain_password(url: str) -> None:
    """Raise ConfigError for a password that would be sent unencrypted to another machine."""
    parts = split_url(url)
    if parts.scheme not in PLAIN or not has_password(url):
        return
    for host, _ in addresses(parts, 6379):
        if not is_loopback(host):
            raise ConfigError(
                f"RSMQ_URL would send its password to {host} unencrypted: use rediss:// (or rediss+cluster://, "
                f"rediss+sentinel://), or set RSMQ_ALLOW_INSECURE=true if the network is trusted"
            )


def is_loopback(host: str) -> bool:
    """Whether it is this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def node_url(url: str, address: tuple[str, int]) -> str:
    """One node of a cluster as a URL of its own: credentials and TLS options are those of the cluster."""
    parts = split_url(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    host, port = address
    netloc = f"{credentials}{at}{f'[{host}]' if ':' in host else host}:{port}"
    return urlunsplit(SplitResult(parts.scheme.partition("+")[0], netloc, "/0", parts.query, ""))


def redact(url: str) -> str:
    """A URL without its password, for logs and errors.

    It also works for invalid URLs: with a slash missing, or a password whose `/`, `#` or `?` is not encoded, the
    standard does not find the password. So everything between the user's name and the last `@` is removed.
    """
    front, at, rest = PASSWORD.sub(r"\1***", url).rpartition("@")  # first: a password in the query may contain an @
    if not at:
        return rest
    scheme, slashes, credentials = front.rpartition("//") if "://" not in front else front.partition("://")
    user, colon, _ = credentials.partition(":")  # without a colon it may be a password in the place of the user
    return f"{scheme}{slashes}{user if slashes and colon else ''}{':' if colon or not slashes else ''}***@{rest}"
