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

/// Hears the backend's notices for as long as the client lives.
pub(super) struct Ear(pub(super) Weak<Core>);

struct Heard {
    core: Arc<Core>,
    shard: usize,
    owner: Owner,
    notice: Notice,
}

thread_local! {
    static LATER: Cell<bool> = const { Cell::new(false) };
    static HEARD: RefCell<Vec<Heard>> = const { RefCell::new(Vec::new()) };
}

impl Listener for Ear {
    fn notice(&self, key: &Key, owner: Owner, notice: Notice) {
        let Some(core) = self.0.upgrade() else { return };
        let heard = Heard { shard: core.shard_of(key), core, owner, notice };
        if LATER.get() {
            // At the very end of a thread it is lost, and its claim looks by itself.
            let _ = HEARD.try_with(|waiting| waiting.borrow_mut().push(heard));
        } else {
            heard.act();
        }
    }
}

impl Heard {
    fn act(self) {
        let Heard { core, shard, owner, notice } = self;
        core.step(shard, |machine, now, actions| machine.notice(now, owner, notice, actions));
    }
}

/// Calls a backend that may give notices, while a shard is locked.
pub(super) fn later<T>(call: impl FnOnce() -> T) -> T {
    struct Until(bool);
    impl Drop for Until {
        fn drop(&mut self) {
            LATER.set(self.0);
        }
    }
    let _until = Until(LATER.replace(true));
    call()
}

/// Acts on what was heard in the meantime, unless a shard is locked still. What is
/// heard while acting is acted on by that step: thousands of notices nest no deeper
/// than one.
pub(super) fn now() {
    if !LATER.get() {
        let heard = HEARD.try_with(RefCell::take).unwrap_or_default();
        heard.into_iter().for_each(Heard::act);
    }
}
