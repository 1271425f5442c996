//! Re-entry: which locks the running code is inside of.
//!
//! `guard.run(..)`, and so the attribute, opens a frame for its key around the code
//! that it runs. A request for the same key inside the frame does not wait for its
//! own holder: it queues at a gate *inside* the lease (see `machine/gate.rs`), which
//! admits one request after the other. So nested calls succeed, and siblings in a
//! `join!` still exclude each other.
//!
//! A frame belongs to the task that runs the code. A task spawned from there is
//! outside the frame and waits like any other task.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;
use smallvec::SmallVec;

use crate::claim::Mode;
use crate::driver::TicketRef;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;

tokio::task_local! {
    static INNERMOST: Arc<Frame>;
}

/// A held key around the running code.
#[derive(Debug)]
pub(crate) struct Frame {
    client: u64,
    key: Key,
    mode: Mode,
    ticket_ref: TicketRef,
    /// The last key of the `all_of` that this key belongs to.
    last_of_all: Option<Key>,
    outer: Option<Arc<Frame>>,
}

impl Frame {
    pub(crate) fn new(client: u64, key: Key, mode: Mode, ticket_ref: TicketRef) -> Self {
        Frame { client, key, mode, ticket_ref, last_of_all: None, outer: None }
    }

    /// The same frame, as one of an `all_of` whose last key is this.
    pub(crate) fn among(mut self, last: Option<&Key>) -> Self {
        self.last_of_all = last.cloned();
        self
    }
}

fn innermost() -> Option<Arc<Frame>> {
    INNERMOST.try_with(Arc::clone).ok()
}

fn frames(innermost: &Option<Arc<Frame>>) -> impl Iterator<Item = &Arc<Frame>> {
    std::iter::successors(innermost.as_ref(), |frame| frame.outer.as_ref())
}

pin_project! {
    /// A future that runs inside frames.
    #[must_use = "it does nothing unless it is polled"]
    pub(crate) struct Inside<F> {
        entry: Entry,
        #[pin]
        future: F,
    }
}

enum Entry {
    /// Not polled yet. The frames around it are known when it is polled first.
    Before(SmallVec<[Frame; 1]>),
    Inside(Option<Arc<Frame>>),
}

impl<F> Inside<F> {
    /// A future that runs inside these frames, the last one innermost.
    pub(crate) fn new(frames: impl IntoIterator<Item = Frame>, future: F) -> Self {
        Inside { entry: Entry::Before(frames.into_iter().collect()), future }
    }
}

impl<F: Future> Future for Inside<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        if let Entry::Before(frames) = this.entry {
            let enter = |outer, frame| Some(Arc::new(Frame { outer, ..frame }));
            *this.entry = Entry::Inside(frames.drain(..).fold(innermost(), enter));
        }
        match this.entry {
            Entry::Inside(Some(frame)) => {
                INNERMOST.sync_scope(frame.clone(), || this.future.poll(cx))
            }
            _ => this.future.poll(cx),
        }
    }
}

/// Whether the running code is inside a lock of this key, of any client.
pub(crate) fn is_inside(key: &Key) -> bool {
    frames(&innermost()).any(|frame| frame.key == *key && !frame.mode.is_permits())
}

/// The ticket of the frame that a request for `key` is nested in; `None` if the
/// request goes to the backend.
///
/// # Errors
/// `WouldDeadlock` if the request could never be granted: a reader that wants to
/// write, or a key that sorts before those of an `all_of` around this code.
pub(crate) fn nesting(client: u64, key: &Key, mode: Mode) -> Result<Option<TicketRef>> {
    if mode.is_permits() {
        return Ok(None);
    }
    let innermost = innermost();
    let would_deadlock = |why: &str| {
        Err(Error::new(ErrorKind::WouldDeadlock, Operation::Acquire)
            .with_key(key)
            .with_message(why))
    };
    for frame in frames(&innermost).filter(|frame| frame.client == client) {
        if frame.key == *key && !frame.mode.is_permits() {
            if frame.mode == Mode::Shared && mode == Mode::Exclusive {
                return would_deadlock(
                    "this code holds the key as a reader, so a writer would wait for it for ever; lock the key exclusively from the start",
                );
            }
            return Ok(Some(frame.ticket_ref));
        }
    }
    let out_of_order = frames(&innermost)
        .filter(|frame| frame.client == client)
        .any(|frame| frame.last_of_all.as_ref().is_some_and(|last| key < last));
    if out_of_order {
        return would_deadlock(
            "this code holds an all_of with keys that sort after this one; add the key to the all_of",
        );
    }
    Ok(None)
}

/// Checks that these sorted keys can be acquired one after the other inside the
/// locks that this code holds.
///
/// # Errors
/// `WouldDeadlock` if one of them is held already and another one sorts before it:
/// other code that locks all of them acquires that one first.
pub(crate) fn in_order(client: u64, keys: &[Key]) -> Result<()> {
    let innermost = innermost();
    let is_held = |key: &Key| {
        frames(&innermost)
            .any(|frame| frame.client == client && frame.key == *key && !frame.mode.is_permits())
    };
    let last_held = keys.iter().rposition(&is_held);
    let before = last_held.and_then(|last| keys[..last].iter().find(|key| !is_held(key)));
    match before {
        Some(key) => Err(Error::new(ErrorKind::WouldDeadlock, Operation::Acquire).with_key(key).with_message(
            "this code holds a key of the all_of that sorts after this one; lock the all_of first",
        )),
        None => Ok(()),
    }
}
