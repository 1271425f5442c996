//! What is due later: one timer for the whole client. It is part of the driver's thread or,
//! embedded, a task in the runtime that is at hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use super::calls::Slots;
use super::{Core, Machine, on_own_thread};
use crate::clock::Moment;

#[derive(Default)]
pub(super) struct Timer {
    /// When the timer is due, in nanoseconds; `NEVER` while it does not run.
    pub(super) due_at: AtomicU64,
    pub(super) changed: Notify,
    pub(super) running: AtomicBool,
    pub(super) closed: AtomicBool,
}

impl Core {
    pub(super) fn schedule(self: &Arc<Self>, due: Moment) {
        let due = due.as_nanos();
        if due >= self.timer.due_at.load(Ordering::Acquire) {
            return;
        }
        self.timer.due_at.fetch_min(due, Ordering::AcqRel);
        if self.timer.running.swap(true, Ordering::AcqRel) {
            self.timer.changed.notify_one();
            return;
        }
        let task = keep_time(Running(self.clone()));
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                runtime.spawn(task);
            }
            Err(_) => {
                // Without a thread leases end by their deadline, as the guards say.
                let _ = on_own_thread(task);
            }
        }
    }

    /// Does what is due in every shard, and returns when something is due next.
    fn tick(self: &Arc<Self>) -> Moment {
        let due = |shard: &usize| self.look(*shard, |machine| machine.next_due());
        // Renewals of all shards share batches.
        let mut slots = Slots::new();
        for shard in (0..self.shards.len()).filter(|shard| due(shard) <= self.clock.now()) {
            let tick = |machine: &mut Machine, now, actions: &mut _| machine.tick(now, actions);
            slots.extend(self.advance(shard, tick, |_, result| result).1);
        }
        self.send_batches(slots);
        (0..self.shards.len()).map(|shard| due(&shard)).min().unwrap_or(Moment::NEVER)
    }

    /// Does what is due, and returns the time until something is due next; `None` if
    /// nothing will be.
    pub(super) fn tick_and_set(self: &Arc<Self>) -> Option<Duration> {
        // Whoever sets something earlier from here on says so.
        self.timer.due_at.store(u64::MAX, Ordering::Release);
        let next = self.tick();
        self.timer.due_at.fetch_min(next.as_nanos(), Ordering::AcqRel);
        (next < Moment::NEVER).then(|| self.clock.sleep_until(next))
    }
}

/// The timer's reference to the client; the client knows when it was dropped.
struct Running(Arc<Core>);

impl Drop for Running {
    fn drop(&mut self) {
        let core = &self.0;
        core.timer.running.store(false, Ordering::Release);
        core.timer.due_at.store(u64::MAX, Ordering::Release);
        if !core.is_closed() {
            // The runtime ended before the client: go on without it.
            let due = core.look_all(|machine| machine.next_due());
            if due.into_iter().any(|due| due < Moment::NEVER)
                && !core.timer.running.swap(true, Ordering::AcqRel)
            {
                let _ = on_own_thread(keep_time(Running(core.clone())));
            }
        }
    }
}

async fn keep_time(running: Running) {
    let core = &running.0;
    while !core.is_closed() {
        let pause = core.tick_and_set();
        wait_for(core, pause).await;
    }
}

pub(super) async fn wait_for(core: &Core, pause: Option<Duration>) {
    match pause {
        Some(pause) => {
            let _ = tokio::time::timeout(pause, core.timer.changed.notified()).await;
        }
        None => core.timer.changed.notified().await,
    }
}
