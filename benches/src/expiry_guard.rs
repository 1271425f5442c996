//! Expiry for the keys that a run stores: if the process is killed, the server
//! removes them some minutes later.

use std::time::Duration;

use anyhow::Result;
use dlock::Config;
use tokio::task::JoinSet;

use crate::server;

/// How long a key stays in the server after the last refresh.
pub const EXPIRY: Duration = Duration::from_secs(10 * 60);
/// How often the expiry is set again.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

/// Keeps setting the expiry of some keys until it is dropped.
#[derive(Debug)]
pub struct ExpiryGuard {
    _task: JoinSet<()>,
}

impl ExpiryGuard {
    /// Starts to refresh these keys. They do not have to exist yet.
    ///
    /// # Errors
    /// Fails if the server cannot be reached.
    pub async fn start(config: &Config, keys: Vec<String>) -> Result<Self> {
        let mut task = JoinSet::new();
        if !keys.is_empty() {
            let mut connection = server::connect(config).await?;
            let mut expires = redis::pipe();
            for key in keys {
                expires.cmd("PEXPIRE").arg(key).arg(EXPIRY.as_millis() as u64).ignore();
            }
            expires.exec_async(&mut connection).await?;
            task.spawn(async move {
                loop {
                    tokio::time::sleep(REFRESH_INTERVAL).await;
                    // If the server fails, the run itself reports it.
                    let _ = expires.exec_async(&mut connection).await;
                }
            });
        }
        Ok(ExpiryGuard { _task: task })
    }
}
