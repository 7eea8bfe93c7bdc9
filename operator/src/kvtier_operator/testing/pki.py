"""Keys and certificates of a throw-away control plane, made with openssl. IO; called by `control_plane`.

Elliptic curves throughout: an RSA key takes longer to make than all of these together.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_operator.errors import MachineError

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_DAYS = ("-days", "365")

# A configuration of our own: what the machine's openssl.cnf adds differs between systems.
_CONFIGURATION = """\
[req]
distinguished_name = subject
[subject]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


@dataclass(frozen=True, slots=True)
class Pki:
    """Files of one control plane.

    Attributes:
        ca: certificate that clients trust.
        server: certificate of the API server.
        server_key: its key.
        service_account_key: signs the tokens of service accounts.
    """

    ca: Path
    server: Path
    server_key: Path
    service_account_key: Path


def make_pki(folder: Path, names: Sequence[str]) -> Pki:
    """Make them in ``folder``, anew.

    Args:
        folder: exists.
        names: of the API server, in the form ``DNS:localhost`` or ``IP:127.0.0.1``.

    Raises:
        MachineError: there is no openssl, or it failed.
    """
    configuration = folder / "openssl.cnf"
    configuration.write_text(_CONFIGURATION.format(names=", ".join(names)), encoding="utf-8")
    ca, ca_key, request = folder / "ca.crt", folder / "ca.key", folder / "server.csr"
    pki = Pki(ca, folder / "server.crt", folder / "server.key", folder / "service-accounts.key")
    with_config = ("-config", configuration)
    authority = ("-x509", *_NEW_KEY, *_DAYS, *with_config, "-extensions", "authority", "-subj", "/CN=kvtier test CA")
    _openssl("req", *authority, "-keyout", ca_key, "-out", ca)
    _openssl("req", *_NEW_KEY, *with_config, "-subj", "/CN=kube-apiserver", "-keyout", pki.server_key, "-out", request)
    signed = ("-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", *_DAYS)
    _openssl("x509", *signed, "-extfile", configuration, "-extensions", "server", "-out", pki.server)
    _openssl("ecparam", "-genkey", "-noout", "-name", "prime256v1", "-out", pki.service_account_key)
    return pki


def _openssl(*arguments: str | Path) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise MachineError(["openssl is not installed: apt-get install -y openssl"])
    result = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise MachineError([f"openssl {arguments[0]} failed: {result.stderr.strip()}"])
