//! A run that is told to end before its time.

use std::fmt;
use std::future::Future;

use anyhow::{Context as _, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Hears the signals that end a program, from when it is made on.
#[derive(Clone, Debug)]
pub struct Interrupt(watch::Receiver<Option<i32>>);

/// What a run fails with that was told to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted {
    /// By which signal.
    pub signal: i32,
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ended by signal {}", self.signal)
    }
}

impl std::error::Error for Interrupted {}

impl Interrupt {
    /// Listens; from now on these signals do not end the program by themselves.
    ///
    /// # Errors
    /// If the system does not let it.
    pub fn listen() -> Result<Self> {
        let (tell, heard) = watch::channel(None);
        let kinds = [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::terminate()];
        for kind in kinds.into_iter().filter(|kind| !is_ignored(kind.as_raw_value())) {
            let mut coming = signal(kind).context("signals cannot be listened to")?;
            let tell = tell.clone();
            tokio::spawn(async move {
                if coming.recv().await.is_some() {
                    tell.send_replace(Some(kind.as_raw_value()));
                }
            });
        }
        Ok(Interrupt(heard))
    }

    /// Does the work, or drops it when told to end.
    ///
    /// # Errors
    /// Those of the work, or [`Interrupted`].
    pub async fn unless<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            done = work => done,
            interrupted = self.heard() => Err(interrupted.into()),
        }
    }

    /// Waits until it is told to end.
    pub async fn heard(&self) -> Interrupted {
        let mut heard = self.0.clone();
        let told = heard.wait_for(Option::is_some).await.ok().and_then(|signal| *signal);
        match told {
            Some(signal) => Interrupted { signal },
            None => std::future::pending().await,
        }
    }
}

/// Whether whoever started this program wants the signal to be ignored, as `nohup`
/// does; not known where there is no /proc.
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
