//! The server that is under load, accessed without dlock.

use std::time::Duration;

use anyhow::{Result, anyhow};
use dlock::{Config, Dlock, Key};
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;

/// The name of the backend that the URL selects.
pub fn backend(config: &Config) -> &str {
    let url = config.url.as_deref().unwrap_or_default();
    match url.split_once("://").map_or(url, |(scheme, _)| scheme) {
        "redis" | "rediss" | "redis+unix" => "redis",
        "redis+sentinel" | "rediss+sentinel" => "redis+sentinel",
        "redis+cluster" | "rediss+cluster" => "redis+cluster",
        "redlock" | "redlocks" => "redlock",
        "postgres" | "postgresql" => "postgres",
        "mysql" | "mariadb" => "mysql",
        "consul" | "consuls" => "consul",
        other => other,
    }
}

/// Whether several servers have the locks, so that no single one tells what they cost.
pub fn is_cluster(config: &Config) -> bool {
    backend(config) == "redis+cluster"
}

/// Whether the locks are kept in this process.
pub fn is_embedded(config: &Config) -> bool {
    backend(config) == "memory"
}

/// Whether the locks are kept by a majority of servers.
pub fn is_quorum(config: &Config) -> bool {
    backend(config) == "redlock"
}

/// Names for locks of others at the servers of a quorum.
pub fn quorum_names(key_prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("dlock:2:bench:{key_prefix}:{number}")).collect()
}

/// Checks that dlock can use the server.
///
/// # Errors
/// Fails with the error of dlock, which says what to do.
pub async fn check_reachable(config: &Config) -> Result<()> {
    let dlock = Dlock::builder().config(config.clone()).connect().await?;
    dlock.shutdown(Duration::ZERO).await;
    Ok(())
}

/// Opens a multiplexed connection with the credentials that dlock uses.
///
/// # Errors
/// Fails if the server cannot be reached.
pub async fn connect(config: &Config) -> Result<MultiplexedConnection> {
    let timeouts = AsyncConnectionConfig::new()
        .set_response_timeout(Some(Duration::from_secs(10)))
        .set_connection_timeout(Some(Duration::from_secs(2)));
    let client = config.redis_client().await?;
    let connecting = client.get_multiplexed_async_connection_with_config(&timeouts);
    connecting
        .await
        .map_err(|error| anyhow!("the server cannot be reached; is it running? ({error})"))
}

/// The Redis names of the keys `key_prefix:0`, `key_prefix:1` and so on, inside the
/// namespace, for values that dlock does not manage.
///
/// # Errors
/// Fails if the names are too long, or the backend is not Redis.
pub fn redis_names(config: &Config, key_prefix: &str, count: usize) -> Result<Vec<String>> {
    let extension = Dlock::builder().config(config.clone()).connect_lazy()?.client_extension();
    let name = |number| Ok(extension.redis_name(&Key::new(format!("{key_prefix}:{number}"))?)?);
    (0..count).map(name).collect()
}

/// The resources that the server has used since its start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// The processor time.
    pub cpu: Duration,
    /// The number of commands, including those inside scripts.
    pub commands: u64,
}

/// Asks the server for its [`Usage`].
///
/// # Errors
/// Fails if the server does not answer.
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

/// The number of scripts that the server has run since its start.
///
/// # Errors
/// Fails if the server does not answer.
pub async fn script_calls(connection: &mut MultiplexedConnection) -> Result<u64> {
    let info: String = redis::cmd("INFO").arg("commandstats").query_async(connection).await?;
    let calls = |line: &str| -> Option<u64> {
        let rest = line.strip_prefix("cmdstat_evalsha:calls=")?;
        rest.split(',').next()?.parse().ok()
    };
    Ok(info.lines().find_map(calls).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use dlock::Config;

    #[test]
    fn the_backend_of_a_url() {
        for (url, name) in [
            ("memory://", "memory"),
            ("redis://u:p@h:1/2?ttl=1s", "redis"),
            ("rediss://h", "redis"),
            ("redlock://a,b,c", "redlock"),
            ("redis+unix:///run/redis.sock", "redis"),
            ("redis+sentinel://h1,h2:1/mymaster", "redis+sentinel"),
            ("rediss+cluster://h1,h2", "redis+cluster"),
            #[cfg(feature = "sqlite")]
            ("sqlite:///tmp/locks.db", "sqlite"),
        ] {
            assert_eq!(super::backend(&Config::from_url(url).unwrap()), name);
        }
    }

    #[test]
    fn names_are_inside_the_namespace() {
        let config = Config::from_url("redis://localhost?namespace=shop").unwrap();
        let names = super::redis_names(&config, "run", 2).unwrap();
        assert_eq!(names, ["dlock:2:{shop:run:0}:i", "dlock:2:{shop:run:1}:i"]);
    }
}
