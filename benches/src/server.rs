//! The server that is under load, seen from outside dlock.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client};

/// The part of a URL that names the backend.
pub fn backend(url: &str) -> &str {
    match url.split_once("://").map_or(url, |(scheme, _)| scheme) {
        "redis" | "rediss" | "redis+unix" => "redis",
        other => other,
    }
}

/// Whether the locks are kept in this process.
pub fn is_embedded(url: &str) -> bool {
    backend(url) == "memory"
}

/// A client of the driver crate, without the options that are dlock's.
///
/// # Errors
/// If the URL is none of Redis.
pub fn client(url: &str) -> Result<Client> {
    if backend(url) != "redis" {
        anyhow::bail!("this needs redis://..., not {}://", backend(url));
    }
    let plain = url.split('?').next().unwrap_or(url);
    Client::open(plain).context("the URL cannot be used")
}

/// One multiplexed connection that waits for its answers.
///
/// # Errors
/// If the server cannot be reached.
pub async fn connect(url: &str) -> Result<MultiplexedConnection> {
    let waits = AsyncConnectionConfig::new()
        .set_response_timeout(Some(Duration::from_secs(10)))
        .set_connection_timeout(Some(Duration::from_secs(2)));
    let client = client(url)?;
    let connecting = client.get_multiplexed_async_connection_with_config(&waits);
    connecting
        .await
        .map_err(|error| anyhow!("the server cannot be reached; is it running? ({error})"))
}

/// What the server has done so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Its processor time.
    pub cpu: Duration,
    /// How many commands it ran, those inside scripts included.
    pub commands: u64,
}

/// Asks the server what it has done so far.
///
/// # Errors
/// If it does not answer.
pub async fn usage(connection: &mut MultiplexedConnection) -> Result<Usage> {
    let info: String = redis::cmd("INFO").query_async(connection).await?;
    let number = |name: &str| -> f64 {
        let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|value| value.trim().parse().ok()).unwrap_or(0.0)
    };
    Ok(Usage {
        cpu: Duration::from_secs_f64(number("used_cpu_sys") + number("used_cpu_user")),
        commands: number("total_commands_processed") as u64,
    })
}

/// How many scripts the server was asked to run so far.
///
/// # Errors
/// If it does not answer.
pub async fn scripts(connection: &mut MultiplexedConnection) -> Result<u64> {
    let info: String = redis::cmd("INFO").arg("commandstats").query_async(connection).await?;
    let calls = |line: &str| -> Option<u64> {
        let rest = line.strip_prefix("cmdstat_evalsha:calls=")?;
        rest.split(',').next()?.parse().ok()
    };
    Ok(info.lines().find_map(calls).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_backend_of_a_url() {
        for (url, name) in [
            ("memory://", "memory"),
            ("redis://u:p@h:1/2?ttl=1s", "redis"),
            ("rediss://h", "redis"),
            ("redis+unix:///run/redis.sock", "redis"),
            ("nonsense", "nonsense"),
        ] {
            assert_eq!(super::backend(url), name);
        }
        assert!(super::client("memory://").is_err());
        assert!(super::client("redis://localhost/0?ttl=5s").is_ok());
    }
}
