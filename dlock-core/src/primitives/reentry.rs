//! Frames: which locks the running code is inside of.
//!
//! `guard.run(..)`, and so the attribute, opens a frame for its key around the
//! code it runs. Whoever asks for that key again inside it does not wait for
//! himself: he queues at a gate *inside* the lease (see `gate.rs`), which lets
//! one in after the other. So nested calls go through, and siblings in a `join!`
//! still exclude each other.
//!
//! A frame belongs to the task that runs the code. A task spawned from there is
//! outside and waits like anybody else.

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
    /// The last key of the `all_of` that this belongs to.
    last_of_all: Option<Key>,
    outer: Option<Arc<Frame>>,
}

impl Frame {
    pub(crate) fn new(client: u64, key: Key, mode: Mode, ticket_ref: TicketRef) -> Self {
        Frame { client, key, mode, ticket_ref, last_of_all: None, outer: None }
    }

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
    /// Not polled yet: what it will be inside of is known when it is.
    Before(SmallVec<[Frame; 1]>),
    Inside(Option<Arc<Frame>>),
}

impl<F> Inside<F> {
    /// Inside these, the last one innermost.
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

/// Whether the running code is inside a lock of this key, of whatever client.
pub(crate) fn is_inside(key: &Key) -> bool {
    frames(&innermost()).any(|frame| frame.key == *key && !frame.mode.is_permits())
}

/// Where a claim for `key` goes: nested in a frame, or out (`None`).
///
/// # Errors
/// `WouldDeadlock` if it could never be granted: a reader that wants to write,
/// or a key that belongs before those of an `all_of` around this code.
pub(crate) fn nesting(client: u64, key: &Key, mode: Mode) -> Result<Option<TicketRef>> {
    if mode.is_permits() {
        return Ok(None);
    }
    let innermost = innermost();
    let would_deadlock = |why: &str| {
        Err(Error::new(ErrorKind::WouldDeadlock, Operation::Acquire).on(key).saying(why))
    };
    for frame in frames(&innermost).filter(|frame| frame.client == client) {
        if frame.key == *key && !frame.mode.is_permits() {
            if frame.mode == Mode::Shared && mode == Mode::Exclusive {
                return would_deadlock(
                    "this code holds the key for reading and cannot wait for itself to write; take it exclusively from the start",
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
            "this code holds an all_of with keys that come after this one; add the key to the all_of",
        );
    }
    Ok(None)
}

/// Whether these keys, sorted, can be taken one after the other inside what this
/// code holds.
///
/// # Errors
/// `WouldDeadlock` if one of them is held already and another one comes before
/// it: whoever takes all of them elsewhere takes that one first.
pub(crate) fn in_order(client: u64, keys: &[Key]) -> Result<()> {
    let innermost = innermost();
    let is_held = |key: &Key| {
        frames(&innermost)
            .any(|frame| frame.client == client && frame.key == *key && !frame.mode.is_permits())
    };
    let last_held = keys.iter().rposition(&is_held);
    let before = last_held.and_then(|last| keys[..last].iter().find(|key| !is_held(key)));
    match before {
        Some(key) => Err(Error::new(ErrorKind::WouldDeadlock, Operation::Acquire).on(key).saying(
            "this code holds a key of the all_of that comes after this one; take the all_of first",
        )),
        None => Ok(()),
    }
}
