//! How a client hears its backend's notices.
//!
//! A notice is a step of the shard that it is about. An embedded backend gives
//! notices while a step has its shard locked, for this client and for others: those
//! wait in the thread until it has not.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

use super::Core;
use crate::backend::Listener;
use crate::claim::{Notice, Owner};
use crate::key::Key;

/// Receives the backend's notices for as long as the client lives.
pub(super) struct NoticeListener(pub(super) Weak<Core>);

struct Delivery {
    core: Arc<Core>,
    shard: usize,
    owner: Owner,
    notice: Notice,
}

thread_local! {
    static DEFERRING: Cell<bool> = const { Cell::new(false) };
    static DEFERRED: RefCell<Vec<Delivery>> = const { RefCell::new(Vec::new()) };
}

impl Listener for NoticeListener {
    fn on_notice(&self, key: &Key, owner: Owner, notice: Notice) {
        let Some(core) = self.0.upgrade() else { return };
        let delivery = Delivery { shard: core.shard_of(key), core, owner, notice };
        if DEFERRING.get() {
            // At the very end of a thread it is lost, and its claim looks by itself.
            let _ = DEFERRED.try_with(|waiting| waiting.borrow_mut().push(delivery));
        } else {
            delivery.deliver();
        }
    }

    fn on_reconnected(&self) {
        if let Some(core) = self.0.upgrade() {
            core.step_all(|machine, now, actions| machine.ask_again(now, actions));
        }
    }

    fn on_session_lost(&self) {
        if let Some(core) = self.0.upgrade() {
            core.step_all(|machine, now, actions| machine.session_lost(now, actions));
        }
    }
}

impl Delivery {
    fn deliver(self) {
        let Delivery { core, shard, owner, notice } = self;
        core.step(shard, |machine, now, actions| machine.notice(now, owner, notice, actions));
    }
}

/// Calls a backend that may give notices, while a shard is locked.
pub(super) fn defer<T>(call: impl FnOnce() -> T) -> T {
    struct Until(bool);
    impl Drop for Until {
        fn drop(&mut self) {
            DEFERRING.set(self.0);
        }
    }
    let _until = Until(DEFERRING.replace(true));
    call()
}

/// Delivers the notices that were deferred, unless a shard is still locked. Notices that
/// come meanwhile are delivered by the same loop, so that thousands of them do not nest on
/// the stack.
pub(super) fn deliver_deferred() {
    if !DEFERRING.get() {
        let delivery = DEFERRED.try_with(RefCell::take).unwrap_or_default();
        delivery.into_iter().for_each(Delivery::deliver);
    }
}
