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
            HEARD.with_borrow_mut(|waiting| waiting.push(heard));
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
    struct Until;
    impl Drop for Until {
        fn drop(&mut self) {
            LATER.set(false);
        }
    }
    LATER.set(true);
    let _until = Until;
    call()
}

/// Acts on what was heard in the meantime; no shard is locked now.
pub(super) fn now() {
    // One at a time: acting may call, and hear, again.
    while let Some(heard) = HEARD
        .with_borrow_mut(|waiting| if waiting.is_empty() { None } else { Some(waiting.remove(0)) })
    {
        heard.act();
    }
}
