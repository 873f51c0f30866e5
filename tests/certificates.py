"""Throw-away authorities, and the files of those whom they have signed."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

__all__ = ["Authority", "CertificateFiles"]


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files of one holder: its certificate, its key, and whom it believes."""

    cert: Path
    key: Path
    ca: Path

    def variables(self, service: str) -> dict[str, str]:
        """As a service's settings name them."""
        prefix = f"HYPIC_{service}_TLS"
        return {
            f"{prefix}_CERT_FILE": str(self.cert),
            f"{prefix}_KEY_FILE": str(self.key),
            f"{prefix}_CA_FILE": str(self.ca),
        }

    def settings(self) -> dict[str, Path]:
        """As keyword arguments of a settings class."""
        return {"tls_cert_file": self.cert, "tls_key_file": self.key, "tls_ca_file": self.ca}


class Authority:
    """Signs certificates into files below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._authority = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca_file)

    def issue(self, *names: str, file: str = "", is_expired: bool = False) -> CertificateFiles:
        """A certificate for these names; `file`: what its files are called, by default as the first name."""
        expires_at = datetime.now(UTC) - timedelta(days=1) if is_expired else None
        issued = self._authority.issue_cert(*names, not_after=expires_at)
        stem = file or names[0]
        files = CertificateFiles(self._folder / f"{stem}.pem", self._folder / f"{stem}.key", self.ca_file)
        files.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(files.key)
        return files
