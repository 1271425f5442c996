//! How a stock is spread over servers: in one home, in several homes of a cluster, or in homes
//! on several independent servers.

use anyhow::{Result, ensure};
use dlock::backend::ServerRole;
use dlock::{Config, Dlock};
use serde::{Deserialize, Serialize};

use crate::server;

/// The homes of a stock, and the URLs of further independent servers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spread {
    /// The number of homes.
    pub homes: u32,
    /// The servers besides the first, whose other options are those of the first.
    pub further: Vec<String>,
}

impl Default for Spread {
    fn default() -> Self {
        Spread { homes: 1, further: Vec::new() }
    }
}

impl Spread {
    /// Splits a URL such as `redis://a:6379,b:6379?homes=6` into those of its servers, and
    /// takes the number of homes out. Without the number, a server has two homes if there are
    /// several, and a cluster has six.
    ///
    /// # Errors
    /// Fails if the number of homes is not a number.
    pub fn parse(url: &str) -> Result<(String, Self)> {
        let (before, query) = url.split_once('?').unwrap_or((url, ""));
        let mut homes = None;
        let mut options = Vec::new();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            match option.strip_prefix("homes=") {
                Some(number) => {
                    let number = number.parse().ok().filter(|number| *number > 0);
                    ensure!(number.is_some(), "`homes` in the URL is a number from 1 on");
                    homes = number;
                }
                None => options.push(option),
            }
        }
        let query = match options.is_empty() {
            true => String::new(),
            false => format!("?{}", options.join("&")),
        };
        let (scheme, rest) = before.split_once("://").unwrap_or(("", before));
        if !matches!(scheme, "redis" | "rediss") {
            let default = if scheme.ends_with("+cluster") { 6 } else { 1 };
            let spread = Spread { homes: homes.unwrap_or(default), further: Vec::new() };
            return Ok((format!("{before}{query}"), spread));
        }
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        let (user, hosts) = match authority.rsplit_once('@') {
            Some((user, hosts)) => (format!("{user}@"), hosts),
            None => (String::new(), authority),
        };
        let url = |host: &str| format!("{scheme}://{user}{host}{path}{query}");
        let mut urls: Vec<String> = hosts.split(',').map(url).collect();
        let first = urls.remove(0);
        let default = if urls.is_empty() { 1 } else { 2 * (urls.len() as u32 + 1) };
        Ok((first, Spread { homes: homes.unwrap_or(default), further: urls }))
    }

    /// Whether it is more than one home on one server.
    pub fn is_several(&self) -> bool {
        self.homes > 1 || !self.further.is_empty()
    }

    /// The configurations of the servers that were named, the first one first.
    pub fn configs(&self, first: &Config) -> Vec<Config> {
        let further = self.further.iter().map(|url| at(first, url));
        std::iter::once(first.clone()).chain(further).collect()
    }

    /// A client of each server that was named.
    ///
    /// # Errors
    /// Fails if one cannot be reached.
    pub async fn connect(&self, first: &Config) -> Result<Vec<Dlock>> {
        let mut clients = Vec::new();
        for config in self.configs(first) {
            clients.push(Dlock::builder().config(config).connect().await?);
        }
        Ok(clients)
    }

    /// The configurations of all servers that have keys: of a cluster, its primaries.
    ///
    /// # Errors
    /// Fails if the cluster cannot be reached.
    pub async fn servers(&self, first: &Config) -> Result<Vec<Config>> {
        if server::is_embedded(first) {
            return Ok(Vec::new());
        }
        let url = first.url.clone().unwrap_or_default();
        let Some((scheme, rest)) = url.split_once("+cluster://") else {
            return Ok(self.configs(first));
        };
        let authority = rest.split(['/', '?']).next().unwrap_or_default();
        let user = authority.rsplit_once('@').map_or(String::new(), |(user, _)| format!("{user}@"));
        let dlock = Dlock::builder().config(first.clone()).connect().await?;
        let primaries =
            dlock.servers().await?.into_iter().filter(|it| it.role == ServerRole::Primary);
        let mut configs: Vec<Config> =
            primaries.map(|it| at(first, &format!("{scheme}://{user}{}", it.address))).collect();
        configs.sort_by(|one, other| one.url.cmp(&other.url));
        Ok(configs)
    }
}

/// The same options at another server.
fn at(first: &Config, url: &str) -> Config {
    let mut config = first.clone();
    config.url = Config::from_url(url).ok().and_then(|parsed| parsed.url).or(Some(url.to_owned()));
    config
}

#[cfg(test)]
mod tests {
    use super::Spread;

    fn parsed(url: &str) -> (String, u32, Vec<String>) {
        let (first, Spread { homes, further }) = Spread::parse(url).expect("a URL");
        (first, homes, further)
    }

    #[test]
    fn a_url_may_name_several_servers_and_homes() {
        let strings = |all: &[&str]| all.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        assert_eq!(parsed("redis://h:1/2"), ("redis://h:1/2".into(), 1, vec![]));
        assert_eq!(
            parsed("redis://u:p@a:1,b:2/3?homes=6&ttl=1s"),
            ("redis://u:p@a:1/3?ttl=1s".into(), 6, strings(&["redis://u:p@b:2/3?ttl=1s"]))
        );
        assert_eq!(parsed("redis://a,b,c").1, 6);
        let cluster = "redis+cluster://a,b,c";
        assert_eq!(parsed(&format!("{cluster}?homes=9")), (cluster.into(), 9, vec![]));
        assert_eq!(parsed(cluster).1, 6);
        assert_eq!(parsed("memory://?homes=3"), ("memory://".into(), 3, vec![]));
        assert!(Spread::parse("redis://a?homes=0").is_err());
    }
}
