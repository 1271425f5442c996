//! Events of the driver's thread, delivered on a thread of their own.
//!
//! Logs, metrics and the hook are other people's code. On the driver's thread a
//! subscriber that blocks would stop renewals, and one that panics would end them. So
//! the driver only puts its events into a bounded queue. When the queue is full, events
//! are dropped and their number is told.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};

use super::{Event, Observer};
use crate::claim::LossReason;
use crate::error::Error;
use crate::key::Key;

/// How many events may wait to be delivered.
const QUEUE: usize = 10_000;

/// An event of the driver's thread.
pub(crate) enum DriverEvent {
    Renewed(Key),
    Uncertain(Key, Error),
    Lost(Key, LossReason),
}

impl DriverEvent {
    pub(crate) fn deliver(&self, observer: &Observer) {
        observer.emit(&match self {
            DriverEvent::Renewed(key) => Event::Renewed { key },
            DriverEvent::Uncertain(key, error) => Event::Uncertain { key, error },
            DriverEvent::Lost(key, reason) => Event::Lost { key, reason },
        });
    }
}

/// The queue of a client, and its thread once there was an event.
#[derive(Default)]
pub(crate) struct Dispatcher {
    sender: OnceLock<Option<SyncSender<DriverEvent>>>,
    dropped: Arc<AtomicUsize>,
}

impl Dispatcher {
    /// Has the event delivered soon, by another thread. Never blocks.
    pub(crate) fn send(&self, observer: &Observer, event: DriverEvent) {
        let sender = self.sender.get_or_init(|| start(observer.clone(), self.dropped.clone()));
        // Without a thread nothing can be told; the guards know all the same.
        let Some(sender) = sender else { return };
        if sender.try_send(event).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn start(observer: Observer, dropped: Arc<AtomicUsize>) -> Option<SyncSender<DriverEvent>> {
    let (sender, events) = sync_channel(QUEUE);
    let deliver = move || deliver(&observer, &events, &dropped);
    std::thread::Builder::new().name("dlock-events".into()).spawn(deliver).ok()?;
    Some(sender)
}

/// Until the client is gone.
fn deliver(observer: &Observer, events: &Receiver<DriverEvent>, dropped: &AtomicUsize) {
    while let Ok(event) = events.recv() {
        event.deliver(observer);
        let dropped = dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            observer.emit_dropped(dropped);
        }
    }
}
