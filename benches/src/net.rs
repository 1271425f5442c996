//! What a run stores that has no end of its own is given one, again and again: if the
//! process is killed, the store is clean a while later.

use std::time::Duration;

use anyhow::Result;
use dlock::Config;
use tokio::task::JoinSet;

use crate::server;

/// How long something outlives the process that stored it.
pub const NET: Duration = Duration::from_secs(10 * 60);
/// How often its end is put off.
const EVERY: Duration = Duration::from_secs(1);

/// Puts the end of things off for as long as it lives.
#[derive(Debug)]
pub struct Net {
    _task: JoinSet<()>,
}

impl Net {
    /// Under these keys, which need not be there yet.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub async fn under(config: &Config, keys: Vec<String>) -> Result<Self> {
        let mut task = JoinSet::new();
        if !keys.is_empty() {
            let mut connection = server::connect(config).await?;
            let mut expires = redis::pipe();
            for key in keys {
                expires.cmd("PEXPIRE").arg(key).arg(NET.as_millis() as u64).ignore();
            }
            expires.exec_async(&mut connection).await?;
            task.spawn(async move {
                loop {
                    tokio::time::sleep(EVERY).await;
                    // If the server fails, the run says so.
                    let _ = expires.exec_async(&mut connection).await;
                }
            });
        }
        Ok(Net { _task: task })
    }
}
