//! What a URL says about a SQL database.

use std::path::{Path, PathBuf};

use url::Url;

#[cfg(any(feature = "mysql", feature = "postgres"))]
use crate::config::{Settings, SslMode, values::read_password};
use crate::error::{Error, Result};

/// The file of `sqlite:///path/file.db`; `sqlite://` is one in the user's state directory.
#[cfg(feature = "sqlite")]
pub(super) fn file(url: &Url) -> Result<PathBuf> {
    if url.host_str().is_some_and(|host| !host.is_empty()) || !url.username().is_empty() {
        return Err(Error::config(
            "sqlite:// takes a path and no host; write three slashes, as in sqlite:///var/lib/shop/locks.db",
        ));
    }
    if !matches!(url.path(), "" | "/") {
        let path = percent_encoding::percent_decode_str(url.path()).decode_utf8();
        let path = path.map_err(|_| Error::config("the path of the URL is not valid UTF-8"))?;
        return Ok(PathBuf::from(path.as_ref()));
    }
    let file = default_file()?;
    if let Some(directory) = file.parent() {
        let mut builder = std::fs::DirBuilder::new();
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.recursive(true).create(directory).map_err(|error| {
            Error::config(format!("cannot make the directory {}: {error}", directory.display()))
        })?;
    }
    Ok(file)
}

/// The file of `sqlite://`, in the user's state directory.
#[cfg(feature = "sqlite")]
pub(crate) fn default_file() -> Result<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    let state = state.filter(|state| state.is_absolute()).or_else(home);
    state.map(|state| state.join("dlock/locks.db")).ok_or_else(|| {
        Error::config("neither XDG_STATE_HOME nor HOME is set, so there is no state directory; write the path, as in sqlite:///var/lib/shop/locks.db")
    })
}

/// A database in memory belongs to one connection, so nobody else would see its locks.
#[cfg(feature = "sqlite")]
pub(super) fn check_file(path: &Path) -> Result<()> {
    let name = path.to_string_lossy();
    match name.is_empty() || name.contains(":memory:") || name.starts_with("file:sqlx-in-memory") {
        true => Err(Error::config(
            "a SQLite database in memory cannot be shared; use memory://, or a file",
        )),
        false => Ok(()),
    }
}

/// A file is made in a directory that exists; SQLite says only that it cannot be opened.
#[cfg(feature = "sqlite")]
pub(super) fn check_directory(file: &Path) -> Result<()> {
    match file.parent() {
        Some(directory) if !directory.as_os_str().is_empty() && !directory.is_dir() => {
            Err(Error::config(format!(
                "the directory {} does not exist, so the database cannot be made there; make it first, or write another path",
                directory.display()
            )))
        }
        _ => Ok(()),
    }
}

/// Whether a server is on this machine: its host is a loopback address, or the directory of a
/// socket. The driver may have the host from the environment (`PGHOST`), so it is asked.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(super) fn is_local(host: &str, socket: Option<&PathBuf>) -> bool {
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    socket.is_some()
        || host == "localhost"
        || host.starts_with('/')
        || address.is_ok_and(|address| address.is_loopback())
}

/// The mode of TLS. Without one, a server of this machine is trusted, and any other must
/// prove who it is.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(super) fn ssl_mode(config: &Settings, is_local: bool) -> SslMode {
    let default = if is_local { SslMode::Disable } else { SslMode::VerifyFull };
    config.sslmode.unwrap_or(default)
}

/// The driver cannot read the URL. Its error may repeat a part of it, so it is not told.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(super) fn unreadable(_: sqlx::Error) -> Error {
    Error::config(
        "the URL cannot be read; write for example postgres://user@localhost:5432/database, and escape special characters in user and password",
    )
}

/// Adds the files of TLS that are configured: that of the authority, and those that prove
/// who the client is.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(super) fn with_tls_files<O>(
    mut options: O,
    config: &Settings,
    ca: impl FnOnce(O, &Path) -> O,
    cert: impl FnOnce(O, &Path) -> O,
    key: impl FnOnce(O, &Path) -> O,
) -> O {
    if let Some(file) = &config.tls_ca {
        options = ca(options, file);
    }
    if let Some(file) = &config.tls_cert {
        options = cert(options, file);
    }
    if let Some(file) = &config.tls_key {
        options = key(options, file);
    }
    options
}

/// How a connection to a server is made.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(super) struct Server<O> {
    options: O,
    password_file: Option<PathBuf>,
    /// The address for errors: without user and password.
    pub(super) shown: String,
}

#[cfg(any(feature = "mysql", feature = "postgres"))]
impl<O: sqlx::ConnectOptions> Server<O> {
    pub(super) fn new(options: O, shown: String, config: &Settings) -> Self {
        let options = options.disable_statement_logging();
        Server { options, password_file: config.password_file.clone(), shown }
    }

    /// The options with the password that the file has now.
    pub(super) fn options(&self, with_password: impl FnOnce(O, &str) -> O) -> Result<O> {
        let options = self.options.clone();
        match &self.password_file {
            Some(file) => Ok(with_password(options, &read_password(file)?)),
            None => Ok(options),
        }
    }
}

#[cfg(any(feature = "mysql", feature = "postgres"))]
impl<O> std::fmt::Debug for Server<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.shown)
    }
}
