//! Where a server is and who asks it, from a URL.

use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::io::tcp::TcpSettings;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, RedisConnectionInfo};
use socket2::TcpKeepalive;
use url::Url;

use crate::error::{Error, Result};

/// How long nothing is sent on a connection before the system asks the other end.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// A server, and how it is called in messages: without user and password.
#[derive(Clone)]
pub(super) struct Address {
    pub(super) info: ConnectionInfo,
    pub(super) shown: String,
}

impl Address {
    pub(super) fn is_tls(&self) -> bool {
        matches!(self.info.addr(), ConnectionAddr::TcpTls { .. })
    }

    /// The server that the URL names; `database` wins over it.
    pub(super) fn new(url: &Url, database: Option<i64>) -> Result<Self> {
        let host = url.host_str().unwrap_or("").trim_matches(['[', ']']).to_owned();
        let host = if host.is_empty() { "127.0.0.1".to_owned() } else { host };
        let port = url.port().unwrap_or(6379);
        let (address, shown) = match url.scheme() {
            "redis" | "redis+sentinel" | "redis+cluster" | "redlock" => tcp(&host, port, false),
            "rediss" | "rediss+sentinel" | "rediss+cluster" | "redlocks" => tcp(&host, port, true),
            "redis+unix" => {
                let path = decoded(url.path())?;
                if path.is_empty() || path == "/" {
                    return Err(Error::config(
                        "redis+unix:// wants a socket: redis+unix:///run/redis.sock",
                    ));
                }
                (ConnectionAddr::Unix(path.clone().into()), path)
            }
            _ => {
                return Err(Error::config(
                    "the URL is not one of Redis; write for example redis://host/0",
                ));
            }
        };
        let mut settings = nobody();
        if !url.username().is_empty() {
            settings = settings.set_username(decoded(url.username())?);
        }
        if let Some(password) = url.password() {
            settings = settings.set_password(decoded(password)?);
        }
        let in_path = match url.path().trim_matches('/') {
            "" => None,
            _ if url.scheme() == "redis+unix" => None,
            path if url.scheme().ends_with("+sentinel") => match path.split_once('/') {
                Some((_, number)) => Some(number.parse().map_err(|_| {
                    Error::config("the path of a redis+sentinel:// URL is the name of the primary, and perhaps the number of a database: redis+sentinel://host/mymaster/0")
                })?),
                None => None,
            },
            number => Some(number.parse().map_err(|_| {
                Error::config("the path of a redis:// URL is the number of a database: redis://host/0")
            })?),
        };
        settings = settings.set_db(database.or(in_path).unwrap_or(0));
        Self::with(address, shown, settings)
    }

    /// A server without a user.
    pub(super) fn of(host: &str, port: u16, tls: bool) -> Result<Self> {
        let (address, shown) = tcp(host, port, tls);
        Self::with(address, shown, nobody())
    }

    fn with(address: ConnectionAddr, shown: String, settings: RedisConnectionInfo) -> Result<Self> {
        let info = address
            .into_connection_info()
            .map_err(|_| {
                Error::config("the URL names no server; write for example redis://localhost/0")
            })?
            .set_tcp_settings(tcp_settings())
            .set_redis_settings(settings);
        Ok(Address { info, shown })
    }

    /// The same server for another user.
    pub(super) fn with_user(mut self, user: Option<&str>, password: Option<&str>) -> Self {
        let mut settings = self.info.redis_settings().clone();
        if let Some(user) = user {
            settings = settings.set_username(user);
        }
        if let Some(password) = password {
            settings = settings.set_password(password);
        }
        self.info = self.info.set_redis_settings(settings);
        self
    }

    /// Another server, reached in the same way and by the same user.
    pub(super) fn moved_to(&self, host: &str, port: u16) -> Self {
        let (address, shown) = tcp(host, port, self.is_tls());
        Address { info: self.info.clone().set_addr(address), shown }
    }
}

/// The address of a server, and how it is called in messages.
fn tcp(host: &str, port: u16, tls: bool) -> (ConnectionAddr, String) {
    let shown =
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let host = host.to_owned();
    if !tls {
        return (ConnectionAddr::Tcp(host, port), shown);
    }
    // Certificates are checked, whatever the URL says.
    let address = ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None };
    (address, format!("{shown} (TLS)"))
}

/// A connection that nobody uses is kept known to what lies between, and one whose packets
/// reach nobody ends.
fn tcp_settings() -> TcpSettings {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 3);
    let settings = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    let settings = settings.set_user_timeout(2 * KEEPALIVE);
    settings
}

fn nobody() -> RedisConnectionInfo {
    RedisConnectionInfo::default().set_lib_name("dlock", env!("CARGO_PKG_VERSION"))
}

fn decoded(text: &str) -> Result<String> {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.map(Into::into).map_err(|_| Error::config("a part of the URL is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn address(url: &str) -> Result<Address> {
        Address::new(&Url::parse(url).unwrap(), None)
    }

    #[test]
    fn urls_are_read() {
        let Address { info, shown } = address("redis://u%40x:p%3Aw@h:7000/3").unwrap();
        assert_eq!(*info.addr(), ConnectionAddr::Tcp("h".into(), 7000));
        assert_eq!(info.redis_settings().username(), Some("u@x"));
        assert_eq!(info.redis_settings().password(), Some("p:w"));
        assert_eq!(info.redis_settings().db(), 3);
        assert!(info.tcp_settings().nodelay() && info.tcp_settings().keepalive().is_some());
        assert_eq!(shown, "h:7000");
        let unix = address("redis+unix:///run/a.sock").unwrap();
        assert_eq!(*unix.info.addr(), ConnectionAddr::Unix("/run/a.sock".into()));
        let v6 = address("redis://[::1]").unwrap();
        assert_eq!(*v6.info.addr(), ConnectionAddr::Tcp("::1".into(), 6379));
        let tls = address("rediss://h/#insecure").unwrap();
        let ConnectionAddr::TcpTls { insecure, .. } = tls.info.addr() else { panic!("plain") };
        assert!(!insecure);
        let url = Url::parse("redis://:old@h/1").unwrap();
        let chosen = Address::new(&url, Some(2)).unwrap();
        assert_eq!(chosen.info.redis_settings().password(), Some("old"));
        assert_eq!(chosen.info.redis_settings().db(), 2);
        let named = address("redis+sentinel://u:p@h/mymaster/3").unwrap();
        assert_eq!(named.info.redis_settings().db(), 3);
        let moved = named.moved_to("::1", 7001);
        assert_eq!(*moved.info.addr(), ConnectionAddr::Tcp("::1".into(), 7001));
        assert_eq!(moved.info.redis_settings().username(), Some("u"));
        assert_eq!(moved.shown, "[::1]:7001");
        for bad in ["redis://h/x", "redis+unix://", "http://h", "redis+sentinel://h/a/x"] {
            assert_eq!(address(bad).map(|_| ()).unwrap_err().kind(), ErrorKind::Config, "{bad}");
        }
    }
}
