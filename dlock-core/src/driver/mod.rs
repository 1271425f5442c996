//! Where the machines meet clocks, threads and the backend.
//!
//! The keys of a client are spread over shards; a task locks one for as long as
//! a pure machine takes a step. What the step calls for is done after the shard
//! is unlocked:
//! - on a remote backend that combines calls, the thread that took the step offers them
//!   to `Backend::submit`. Calls that it does not take, and all calls of other remote
//!   backends, go to the driver's own thread and runtime, which puts a time-out around
//!   each and brings the answers back;
//! - on the embedded backend a call is answered at once, so it is made right
//!   here, without a thread and within the step; only the notices that come of it
//!   wait until the shard is unlocked.
//!
//! What is due later is done by one timer for the whole client: part of the
//! driver's thread or, embedded, a task in the runtime that is at hand, so that a
//! test can pause the time. Should that runtime end first, a thread takes over.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::thread::ThreadId;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rand::RngExt as _;
use smallvec::SmallVec;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use self::calls::Slots;
use self::shutdown::FLUSH;
use self::timer::{Timer, wait_for};
use crate::backend::{Backend, Listener};
use crate::claim::Answer;
use crate::clock::{Clock, Moment};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::key::Key;
use crate::machine::{Action, Actions, CallId, Engine, Limits, Ticket};
use crate::observe::Observer;
use crate::observe::dispatch::{Dispatcher, DriverEvent};
use crate::planted_bug::PlantedBug;

mod calls;
mod notices;
mod shutdown;
mod timer;

pub(crate) type Wakers = SmallVec<[Waker; 1]>;

/// Makes this the only waker. The old ones are returned, to be dropped where no lock is
/// held: dropping a waker may drop a task, and with it guards.
pub(crate) fn wake_only(wakers: &mut Wakers, waker: &Waker) -> Wakers {
    if let [present] = wakers.as_slice()
        && present.will_wake(waker)
    {
        return Wakers::new();
    }
    std::mem::replace(wakers, smallvec::smallvec![waker.clone()])
}
pub(crate) type Machine = Engine<Wakers>;

pub(crate) struct Core {
    listener: Arc<notices::NoticeListener>,
    shards: Box<[Mutex<Machine>]>,
    backend: Arc<dyn Backend>,
    clock: Clock,
    call_timeout: Duration,
    /// The futures for the driver's thread; `None` if calls are made in place.
    jobs: Option<UnboundedSender<Job>>,
    pending_calls: Option<calls::PendingCalls>,
    /// Limits the number of calls that are made at the same time and not combined.
    single_calls: Arc<Semaphore>,
    timer: Timer,
    pub(crate) observer: Observer,
    events: Dispatcher,
    /// The process that made the client: a child after `fork` has no driver.
    process: AtomicU32,
    driver: DriverState,
}

/// Whether the driver's thread is at work.
#[derive(Default)]
struct DriverState {
    thread: OnceLock<ThreadId>,
    ended: Mutex<bool>,
    changed: Condvar,
}

/// A future for the driver's runtime.
type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Core {
    pub(crate) fn start(
        backend: Arc<dyn Backend>,
        clock: Clock,
        client: u64,
        limits: Limits,
        call_timeout: Duration,
        observer: Observer,
        planted: PlantedBug,
    ) -> Result<Arc<Self>> {
        let remote = backend.capabilities().remote;
        let shards = std::thread::available_parallelism().map_or(4, usize::from) * 4;
        let mut random = rand::rng();
        let shards = (0..shards.next_power_of_two().min(64))
            .map(|_| Mutex::new(Engine::new(limits, random.random(), planted)))
            .collect();
        let (jobs, receiver) = if remote {
            let (jobs, receiver) = unbounded_channel();
            (Some(jobs), Some(receiver))
        } else {
            (None, None)
        };
        let pending_calls = calls::pending_calls(&*backend);
        let core = Arc::new_cyclic(|core| Core {
            listener: Arc::new(notices::NoticeListener(core.clone())),
            shards,
            backend,
            clock,
            call_timeout,
            jobs,
            pending_calls,
            single_calls: Arc::new(Semaphore::new(calls::MAX_SINGLE_CALLS)),
            timer: Timer { due_at: AtomicU64::new(u64::MAX), ..Timer::default() },
            observer,
            events: Dispatcher::default(),
            process: AtomicU32::new(std::process::id()),
            driver: DriverState::default(),
        });
        let listener: Arc<dyn Listener> = core.listener.clone();
        core.backend.open(client, Arc::downgrade(&listener));
        if let Some(receiver) = receiver {
            core.timer.running.store(true, Ordering::Release);
            start_driver(core.clone(), receiver)?;
        }
        Ok(core)
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    pub(crate) fn shard_of(&self, key: &Key) -> usize {
        // The high bits: the maps inside a shard use the low ones.
        (key.hash() >> 32) as usize & (self.shards.len() - 1)
    }

    /// Reads a shard, without actions afterwards.
    pub(crate) fn look<T>(&self, shard: usize, look: impl FnOnce(&mut Machine) -> T) -> T {
        look(&mut self.shards[shard].lock())
    }

    /// Lets a shard take a step, and carries out its actions.
    pub(crate) fn step<T>(
        self: &Arc<Self>,
        shard: usize,
        step: impl FnOnce(&mut Machine, Moment, &mut Actions) -> T,
    ) -> T {
        self.step_then(shard, step, |_, result| result)
    }

    /// The same, and then looks at the shard: on the embedded backend, after the
    /// calls of the step were answered.
    pub(crate) fn step_then<S, T>(
        self: &Arc<Self>,
        shard: usize,
        step: impl FnOnce(&mut Machine, Moment, &mut Actions) -> S,
        then: impl FnOnce(&mut Machine, S) -> T,
    ) -> T {
        let (result, slots) = self.advance(shard, step, then);
        self.send_batches(slots);
        result
    }

    /// Lets a shard take a step and carries out its actions, but for the calls: they are
    /// pending, and leave when the caller [sends](Self::send_batches) them.
    fn advance<S, T>(
        self: &Arc<Self>,
        shard: usize,
        step: impl FnOnce(&mut Machine, Moment, &mut Actions) -> S,
        then: impl FnOnce(&mut Machine, S) -> T,
    ) -> (T, Slots) {
        let mut actions = Actions::new();
        let mut wakers = Wakers::new();
        let now = self.clock.now();
        let mut machine = self.shards[shard].lock();
        let result = step(&mut machine, now, &mut actions);
        let mut done = 0;
        while let Some(action) = actions.get_mut(done) {
            done += 1;
            match action {
                Action::Wake(ticket) => {
                    if let Some(waiting) = machine.payload_mut(*ticket) {
                        wakers.append(waiting);
                    }
                }
                Action::Call(call, request) if self.jobs.is_none() => {
                    let call = *call;
                    let answer = notices::defer(|| self.backend.call_now(request, now));
                    // No time passed that anybody could notice.
                    machine.reply(now, call, answer, &mut actions);
                }
                _ => {}
            }
        }
        let due = machine.next_due();
        let result = then(&mut machine, result);
        drop(machine);
        self.schedule(due);
        notices::deliver_deferred();
        wakers.into_iter().for_each(Waker::wake);
        // Before anything is told: a hook must not keep calls from being sent.
        let mut slots = Slots::new();
        if self.jobs.is_some() {
            let calls = actions.iter().filter_map(|action| match action {
                Action::Call(call, request) => Some((*call, request.clone())),
                _ => None,
            });
            slots = self.push(shard, calls.collect());
        }
        self.tell(actions);
        (result, slots)
    }

    /// Tells what happened to leases.
    fn tell(&self, actions: Actions) {
        for action in actions {
            match action {
                Action::Wake(_) | Action::Call(..) => {}
                Action::Renewed(key) => {
                    if self.observer.wants_renewals() {
                        self.emit(DriverEvent::Renewed(key));
                    }
                }
                Action::Uncertain(key, error) => self.emit(DriverEvent::Uncertain(key, error)),
                Action::Lost(key, reason) => self.emit(DriverEvent::Lost(key, reason)),
            }
        }
    }

    /// Tells what happened to a lease. On the driver's thread that is left to another one.
    fn emit(&self, event: DriverEvent) {
        if self.jobs.is_some() {
            self.events.send(&self.observer, event);
        } else {
            event.deliver(&self.observer);
        }
    }

    pub(crate) fn step_all(
        self: &Arc<Self>,
        mut step: impl FnMut(&mut Machine, Moment, &mut Actions),
    ) {
        for shard in 0..self.shards.len() {
            self.step(shard, &mut step);
        }
    }

    pub(crate) fn look_all<T>(&self, mut look: impl FnMut(&mut Machine) -> T) -> Vec<T> {
        (0..self.shards.len()).map(|shard| self.look(shard, &mut look)).collect()
    }

    fn answered(self: &Arc<Self>, shard: usize, call: CallId, answer: Answer) {
        self.step(shard, |machine, now, actions| machine.reply(now, call, answer, actions));
        if self.is_closed() {
            self.timer.changed.notify_one(); // it may have been the last thing owed
        }
    }

    /// A call to the backend outside the machines: on the driver's thread, since
    /// connections live in the runtime that made them, and with a time-out.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        operation: Operation,
        call: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let Some(jobs) = &self.jobs else {
            return call.await; // embedded: answered at once
        };
        if self.is_in_child() {
            return Err(no_driver_in_child(operation));
        }
        let silence =
            |what: String| Err(Error::new(ErrorKind::Unavailable, operation).with_message(what));
        let (answer, answered) = tokio::sync::oneshot::channel();
        let call_timeout = self.call_timeout;
        let job = async move {
            let made = tokio::time::timeout(call_timeout, call).await;
            let _ = answer.send(made.ok());
        };
        let sent = jobs.send(Box::pin(job));
        match answered.await {
            Ok(Some(made)) => made,
            Ok(None) if operation == Operation::Break => {
                Err(Error::new(ErrorKind::Unknown, operation).with_message(format!(
                    "no answer within {call_timeout:?}; the change may or may not have been made"
                )))
            }
            Ok(None) => silence(format!("no answer within {call_timeout:?}")),
            Err(_) if sent.is_err() => silence("the driver has ended".into()),
            Err(_) => silence("the driver ended before the answer".into()),
        }
    }

    /// Runs a future on the driver's thread.
    pub(crate) fn spawn(&self, job: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        if self.is_in_child() {
            return Err(no_driver_in_child(Operation::Connect));
        }
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(Box::pin(job)));
        match sent {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => Err(Error::new(ErrorKind::Unavailable, Operation::Connect)
                .with_message("there is no driver, or it has ended")),
        }
    }

    /// Whether the backend answers.
    pub(crate) async fn ping(&self) -> Result<()> {
        let backend = self.backend.clone();
        self.ask(Operation::Connect, async move { backend.ping().await }).await
    }

    /// Whether this is a child of the process that made the client.
    pub(crate) fn is_in_child(&self) -> bool {
        self.jobs.is_some() && std::process::id() != self.process.load(Ordering::Relaxed)
    }

    /// Makes the client believe that it is in a child process, for a test.
    #[cfg(test)]
    pub(crate) fn set_in_child(&self) {
        self.process.store(u32::MAX, Ordering::Relaxed);
    }

    fn is_closed(&self) -> bool {
        self.timer.closed.load(Ordering::Acquire)
    }

    pub(crate) fn has_pending_releases(&self) -> bool {
        self.look_all(|machine| machine.has_pending_releases()).into_iter().any(|pending| pending)
    }
}

/// Starts the thread of a remote backend's driver. Should the driver panic, it starts
/// again: the machines and the connections are still there.
fn start_driver(core: Arc<Core>, mut jobs: UnboundedReceiver<Job>) -> Result<()> {
    let runtime = runtime()?;
    let run = move || {
        let _ = core.driver.thread.set(std::thread::current().id());
        let mut drive = || runtime.block_on(drive(&core, &mut jobs));
        while std::panic::catch_unwind(AssertUnwindSafe(&mut drive)).is_err() {
            core.resume_sending();
        }
        *core.driver.ended.lock() = true;
        core.driver.changed.notify_all();
    };
    std::thread::Builder::new().name("dlock".into()).spawn(run).map_err(no_thread)?;
    Ok(())
}

/// The driver of a remote backend.
async fn drive(core: &Arc<Core>, jobs: &mut UnboundedReceiver<Job>) {
    let mut flush_until = None;
    loop {
        let mut pause = core.tick_and_set();
        if core.is_closed() {
            let until = *flush_until.get_or_insert(core.now() + FLUSH);
            let left = until.since(core.now());
            if left.is_zero() || !core.has_pending_releases() {
                let _ = tokio::time::timeout(FLUSH, core.backend.close()).await;
                return;
            }
            pause = Some(pause.unwrap_or(left).min(left));
        }
        tokio::select! {
            biased;
            job = jobs.recv() => {
                let Some(job) = job else { return };
                tokio::spawn(job);
            }
            () = wait_for(core, pause) => {}
        }
    }
}

/// A child after `fork` has no driver, so nothing would ever be answered.
fn no_driver_in_child(operation: Operation) -> Error {
    Error::new(ErrorKind::Config, operation).with_message(
        "this client was made before fork() and has no driver here; make one in the child",
    )
}

fn no_thread(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, Operation::Connect)
        .with_message("could not start the driver's thread")
        .with_source(error)
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().thread_name("dlock").build().map_err(no_thread)
}

fn on_own_thread(task: impl Future<Output = ()> + Send + 'static) -> Result<()> {
    let runtime = runtime()?;
    let task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(task);
    std::thread::Builder::new()
        .name("dlock".into())
        .spawn(move || runtime.block_on(task))
        .map_err(no_thread)?;
    Ok(())
}

/// A ticket and its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TicketRef {
    pub(crate) shard: usize,
    pub(crate) ticket: Ticket,
}
