//! Reading a URL, and telling what was probably meant when it cannot be read. The URL
//! may hold a password, so an error repeats nothing but its scheme.

use url::Url;

use super::backends::SCHEMES;
use crate::error::{Error, Result};

/// Schemes that others use for what has another name here.
const OTHER_NAMES: &[(&str, &str)] = &[
    ("unix", "redis+unix"),
    ("redis-unix", "redis+unix"),
    ("redis+socket", "redis+unix"),
    ("redis-socket", "redis+unix"),
    ("redis+tls", "rediss"),
    ("redis+ssl", "rediss"),
    ("tls", "rediss"),
    ("https", "rediss"),
    ("sentinel", "redis+sentinel"),
    ("redis-sentinel", "redis+sentinel"),
    ("redis_sentinel", "redis+sentinel"),
    ("redis+tls+sentinel", "rediss+sentinel"),
    ("redis+redlock", "redlock"),
    ("redis-redlock", "redlock"),
    ("quorum", "redlock"),
    ("cluster", "redis+cluster"),
    ("redis-cluster", "redis+cluster"),
    ("redis_cluster", "redis+cluster"),
    ("zk", "zookeeper"),
    ("valkeys", "rediss"),
    ("valkey", "redis"),
    ("consul+https", "consuls"),
    ("consul+tls", "consuls"),
    ("tcp", "redis"),
    ("http", "redis"),
];
/// The schemes whose URL may name several hosts, and the port of a host without one.
const SEVERAL_HOSTS: &[(&str, u16)] = &[
    ("redis+sentinel", 26379),
    ("rediss+sentinel", 26379),
    ("redis+cluster", 6379),
    ("rediss+cluster", 6379),
    ("redlock", 6379),
    ("redlocks", 6379),
    ("zookeeper", 2181),
    ("etcd", 2379),
    ("etcds", 2379),
];
/// Schemes that need a feature, and the feature.
const NEED_A_FEATURE: &[(&str, &str)] = &[
    ("redis", "redis"),
    ("rediss", "redis"),
    ("redis+unix", "redis"),
    ("redis+sentinel", "redis"),
    ("rediss+sentinel", "redis"),
    ("redis+cluster", "redis"),
    ("rediss+cluster", "redis"),
    ("redlock", "redis"),
    ("redlocks", "redis"),
    ("postgres", "postgres"),
    ("postgresql", "postgres"),
    ("mysql", "mysql"),
    ("mariadb", "mysql"),
    ("sqlite", "sqlite"),
    ("consul", "consul"),
    ("consuls", "consul"),
    ("zookeeper", "zookeeper"),
    ("etcd", "etcd"),
    ("etcds", "etcd"),
];
/// The most letters in which a misspelt scheme differs from the one that was meant.
const MAX_DISTANCE: usize = 2;

/// A host and its port.
pub(crate) type HostPort = (String, u16);

/// A URL, which may name several hosts: `redis+sentinel://a:26379,b:26379/name`.
pub(crate) struct ServerUrl {
    /// The URL with the first of the hosts only.
    pub(crate) url: Url,
    /// All hosts, for schemes that may have several.
    pub(crate) hosts: Vec<HostPort>,
    /// The part with the hosts, as it was written.
    written: String,
}

impl ServerUrl {
    /// Splits the hosts. Nothing is said about the scheme.
    fn split(text: &str) -> Result<Self> {
        let bad = |error: url::ParseError| {
            Error::config(format!(
                "the URL is not valid ({error}); write for example redis://localhost:6379"
            ))
        };
        let scheme = text.split(':').next().unwrap_or("").to_ascii_lowercase();
        let several = SEVERAL_HOSTS.iter().find(|(known, _)| *known == scheme);
        let (Some((_, port)), Some(start)) = (several, text.find("://")) else {
            let url = Url::parse(text).map_err(bad)?;
            if url.host_str().is_some_and(|host| host.contains(',')) {
                return Err(Error::config(format!(
                    "{scheme}:// names one server; for the primary behind several Sentinels write redis+sentinel://host1,host2/name, for a Redis Cluster redis+cluster://host1,host2, for a majority of independent servers redlock://host1,host2,host3"
                )));
            }
            return Ok(ServerUrl { url, hosts: Vec::new(), written: String::new() });
        };
        let authority = &text[start + 3..];
        let authority = &authority[..authority.find(['/', '?', '#']).unwrap_or(authority.len())];
        let written = authority.rsplit('@').next().unwrap_or("");
        let mut hosts = Vec::new();
        for (place, host) in written.split(',').enumerate() {
            let parsed = Url::parse(&format!("{scheme}://{host}"));
            let parsed = parsed.ok().filter(|url| url.host_str().is_some_and(|it| !it.is_empty()));
            let Some(parsed) = parsed else {
                return Err(Error::config(format!(
                    "host {} in the list of hosts of the URL is not valid; write for example {scheme}://host1:{port},host2:{port}",
                    place + 1
                )));
            };
            let name = parsed.host_str().unwrap_or("").trim_matches(['[', ']']).to_owned();
            hosts.push((name, parsed.port().unwrap_or(*port)));
        }
        let one = written.split(',').next().unwrap_or("");
        let before = text.len() - text[start + 3..].len() + authority.len() - written.len();
        let after = &text[before + written.len()..];
        let url = Url::parse(&format!("{}{one}{after}", &text[..before])).map_err(bad)?;
        Ok(ServerUrl { url, hosts, written: written.to_owned() })
    }

    /// Without the query.
    pub(super) fn without_query(mut self, text: &str) -> String {
        if self.hosts.is_empty() {
            self.url.set_query(None);
            return self.url.into();
        }
        text.split(['?', '#']).next().unwrap_or("").to_owned()
    }
}

/// The URL without user, password and query.
pub(super) fn redacted(text: &str) -> String {
    let Ok(ServerUrl { url, written, .. }) = ServerUrl::split(text) else {
        return "(not a URL)".into();
    };
    let path = url.path().trim_end_matches('/');
    if !written.is_empty() {
        return format!("{}://{written}{path}", url.scheme());
    }
    let host = url.host_str().unwrap_or("");
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{host}{port}{path}", url.scheme())
}

/// Parses a URL whose scheme is known.
pub(crate) fn parse_url(text: &str) -> Result<ServerUrl> {
    if text.trim().is_empty() {
        return Err(Error::config("the URL is empty; write for example redis://localhost:6379"));
    }
    if text.starts_with('/') {
        return Err(Error::config(
            "the URL has no scheme; for a socket write redis+unix:// before the path",
        ));
    }
    let (scheme, rest) = text.split_once(':').unwrap_or(("", text));
    let scheme = scheme.to_ascii_lowercase();
    let known = SCHEMES.contains(&scheme.as_str());
    if !rest.starts_with("//") {
        return Err(Error::config(match meant(&scheme) {
            Some(meant) => format!("the URL has no `//` after its scheme; write {meant}://"),
            None => format!(
                "the URL has no scheme; write for example redis:// before the host, as in redis://localhost:6379 ({})",
                supported()
            ),
        }));
    }
    if let Some((_, feature)) = NEED_A_FEATURE.iter().find(|(name, _)| *name == scheme)
        && !known
    {
        return Err(Error::config(format!(
            "{scheme}:// is not compiled in; build with the feature `{feature}` ({})",
            supported()
        )));
    }
    if !known {
        let hint = meant(&scheme).map(|meant| format!("; did you mean {meant}://?"));
        return Err(Error::config(format!(
            "unknown scheme `{scheme}://`{} ({})",
            hint.unwrap_or_default(),
            supported()
        )));
    }
    ServerUrl::split(text)
}

fn supported() -> String {
    format!("this build supports {}://", SCHEMES.join("://, "))
}

/// The scheme that was probably meant, if it is compiled in.
fn meant(scheme: &str) -> Option<&'static str> {
    if let Some((_, meant)) = OTHER_NAMES.iter().find(|(other, _)| *other == scheme) {
        return SCHEMES.contains(meant).then_some(*meant);
    }
    nearest(scheme, SCHEMES)
}

/// The one of these names that differs least from `name`, if it is near enough to be meant.
pub(super) fn nearest(name: &str, known: &[&'static str]) -> Option<&'static str> {
    let near = known.iter().map(|known| (distance(name, known), *known));
    let (distance, nearest) = near.min_by_key(|(distance, _)| *distance)?;
    (distance <= MAX_DISTANCE).then_some(nearest)
}

/// How many letters must be inserted, removed or replaced to make one of the other.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in other.bytes().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[other.len()]
}
