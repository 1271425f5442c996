//! Signals that end a run early.

use std::fmt;
use std::future::Future;

use anyhow::{Context as _, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Receives the signals that ask the program to end: SIGHUP, SIGINT and SIGTERM.
#[derive(Clone, Debug)]
pub struct Interrupt(watch::Receiver<Option<i32>>);

/// The error of a run that was ended by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted {
    /// The number of the signal.
    pub signal: i32,
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ended by signal {}", self.signal)
    }
}

impl std::error::Error for Interrupted {}

impl Interrupt {
    /// Starts to listen. From now on these signals do not end the program by themselves.
    ///
    /// # Errors
    /// Fails if the system does not allow it.
    pub fn listen() -> Result<Self> {
        let (sender, receiver) = watch::channel(None);
        let kinds = [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::terminate()];
        for kind in kinds.into_iter().filter(|kind| !is_ignored(kind.as_raw_value())) {
            let mut signals = signal(kind).context("cannot listen to signals")?;
            let sender = sender.clone();
            tokio::spawn(async move {
                if signals.recv().await.is_some() {
                    sender.send_replace(Some(kind.as_raw_value()));
                }
            });
        }
        Ok(Interrupt(receiver))
    }

    /// Runs the future to its end, or drops it when a signal comes.
    ///
    /// # Errors
    /// Fails with the error of the future, or with [`Interrupted`].
    pub async fn run_until_signal<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            done = work => done,
            interrupted = self.signalled() => Err(interrupted.into()),
        }
    }

    /// Waits for a signal.
    pub async fn signalled(&self) -> Interrupted {
        let mut receiver = self.0.clone();
        let signal = receiver.wait_for(Option::is_some).await.ok().and_then(|signal| *signal);
        match signal {
            Some(signal) => Interrupted { signal },
            None => std::future::pending().await,
        }
    }
}

/// Whether this program was started with the signal ignored, as `nohup` does. Always
/// false on systems without /proc.
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
