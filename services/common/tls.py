"""Mutual TLS between services: both sides show a certificate that the deployment's own authority has signed."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

__all__ = ["Identity", "TlsFiles", "check_files", "server_credentials"]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: a certificate with its chain, its key, and the authority that every peer's certificate must come from."""

    cert_file: Path
    key_file: Path
    ca_file: Path


@dataclass(frozen=True, slots=True)
class Identity:
    """What a service shows and whom it believes.

    cache_name, worker_name: DNS names that the certificates of cache services and of workers must carry, whatever address
    they are reached at: a headless service stands for addresses that no certificate names.
    """

    files: TlsFiles
    cache_name: str
    worker_name: str

    def cache_credentials(self) -> tuple[grpc.ChannelCredentials, str]:
        """For a channel to the cache service, and the name to check. Files are read once, for the channel's life."""
        return self._channel_credentials(), self.cache_name

    def worker_credentials(self) -> tuple[grpc.ChannelCredentials, str]:
        """For a channel to a worker, and the name to check."""
        return self._channel_credentials(), self.worker_name

    def _channel_credentials(self) -> grpc.ChannelCredentials:
        files = self.files
        return grpc.ssl_channel_credentials(
            files.ca_file.read_bytes(), files.key_file.read_bytes(), files.cert_file.read_bytes()
        )


class _ServerFiles:
    """Hands gRPC the files' content anew when it has changed; a new connection asks."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = self._read()

    def first(self) -> grpc.ServerCertificateConfiguration:
        return _configuration(self._seen)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            content = self._read()
        except OSError:
            # Being replaced just now: the next connection sees it.
            return None
        if content == self._seen:
            return None
        self._seen = content
        return _configuration(content)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        files = self._files
        return files.key_file.read_bytes(), files.cert_file.read_bytes(), files.ca_file.read_bytes()


def _configuration(content: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    key, certificate, authority = content
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For a server that serves nobody without a certificate of the authority; follows the files as they change."""
    source = _ServerFiles(files)
    return grpc.dynamic_ssl_server_credentials(source.first(), source.changed, True)  # type: ignore[arg-type] # None, as its documentation says, where nothing has changed


def check_files(files: TlsFiles) -> None:
    """Raise ValueError, naming the file, where one cannot be read, or certificate and key are no pair."""
    for path in (files.cert_file, files.key_file, files.ca_file):
        try:
            path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert_file, files.key_file)
    except ssl.SSLError as error:
        raise ValueError(
            f"{files.cert_file} and {files.key_file} are no certificate and its key: {error.reason}"
        ) from error
    try:
        context.load_verify_locations(files.ca_file)
    except ssl.SSLError as error:
        raise ValueError(f"{files.ca_file} holds no certificate: {error.reason}") from error
