//! The network of a simulation, its servers, and its faults.

use std::time::Duration;

use dlock::backend::memory::lock_table::{LockTable, SentNotice};
use dlock::backend::{AcquireOutcome, Answer, Request};
use dlock::machine::CallId;
use dlock::{Error, ErrorKind, Operation};
use rand::RngExt as _;

use super::super::checker::DataLoss;
use super::super::plan::Fault;
use super::{EPOCH_MICROS, Event, Server, Simulation};

impl Simulation {
    /// How long a message takes; `None` if it never arrives.
    pub(super) fn delay(&mut self) -> Option<Duration> {
        let usual = self.between(Duration::from_micros(50), Duration::from_millis(3));
        if !self.is_faulty() {
            return Some(usual);
        }
        let drawn = self.random.random_range(0..1000);
        if drawn < self.plan.dropped {
            self.report.message_faults += 1;
            self.last_trouble = self.now;
            return None;
        }
        if drawn < self.plan.dropped + self.plan.late {
            self.report.message_faults += 1;
            self.last_trouble = self.now + self.plan.latest;
            return Some(self.between(Duration::ZERO, self.plan.latest));
        }
        Some(usual)
    }

    pub(super) fn deliver(&mut self, event: Event) {
        if let Some(delay) = self.delay() {
            self.after(delay, event.clone());
        }
        if self.is_faulty() && self.random.random_range(0..1000) < self.plan.duplicated {
            self.report.message_faults += 1;
            let again = self.between(Duration::ZERO, self.plan.latest);
            // An old request that arrives again may say that a waiter asked long ago.
            self.last_trouble = self.last_trouble.max(self.now + again);
            self.after(again, event);
        }
    }

    pub(super) fn send(&mut self, process: usize, server: usize, call: CallId, request: Request) {
        let incarnation = self.processes[process].incarnation;
        self.processes[process].unanswered[server].insert(call, request.clone());
        let timeout = self.plan.call_timeout;
        self.after(timeout, Event::TimeOut { process, incarnation, server, call });
        if self.servers[server].down {
            let answer = failed(&request, ErrorKind::Unavailable);
            let soon = self.between(Duration::from_micros(50), Duration::from_millis(1));
            let answer = Box::new(answer);
            return self.after(soon, Event::Answer { process, incarnation, server, call, answer });
        }
        let request = Box::new(request);
        self.deliver(Event::Request { process, incarnation, server, call, request });
    }

    pub(super) fn serve(
        &mut self,
        process: usize,
        incarnation: u32,
        server: usize,
        call: CallId,
        request: &Request,
    ) {
        let mut sent = Vec::new();
        let Server { queue, clock, .. } = &mut self.servers[server];
        let now = clock.at(self.now);
        let answer = match request {
            Request::Acquire(claim) => Answer::Acquire(Ok(queue.acquire(now, claim, &mut sent))),
            Request::Renew(claim) => Answer::Renew(Ok(queue.renew(now, claim, &mut sent))),
            Request::Release(claim, how) => {
                Answer::Release(Ok(queue.release(now, claim, *how, &mut sent)))
            }
        };
        self.log(|| format!("  -> {answer:?}"));
        if let (Request::Acquire(claim), Answer::Acquire(Ok(AcquireOutcome::Granted(_)))) =
            (request, &answer)
        {
            self.break_soon(&claim.key);
        }
        let answer = Box::new(answer);
        self.deliver(Event::Answer { process, incarnation, server, call, answer });
        for SentNotice { client, owner, notice, .. } in sent {
            self.deliver(Event::Notice { client, server, owner, notice });
        }
    }

    pub(super) fn answered(&mut self, process: usize, server: usize, call: CallId, answer: Answer) {
        if self.processes[process].unanswered[server].remove(&call).is_none() {
            return; // after its time-out, or a duplicate
        }
        self.step(process, server, |machine, now, actions| {
            machine.reply(now, call, answer, actions)
        });
        self.check_server(server);
    }

    pub(super) fn begin(&mut self, fault: Fault) {
        let lasts = match fault {
            Fault::PauseProcess { process, lasts } => {
                if !self.processes[process].alive || self.processes[process].paused {
                    return;
                }
                self.processes[process].paused = true;
                lasts
            }
            Fault::KillProcess { process, lasts } => {
                if !self.processes[process].alive {
                    return;
                }
                let dead = &mut self.processes[process];
                dead.alive = false;
                dead.paused = false;
                dead.deferred.clear();
                self.checker.remove_all(|run| run.process == process);
                lasts
            }
            Fault::ShutDown { process, grace, lasts } => {
                let it = &self.processes[process];
                if !it.alive || it.paused || it.shutting_down {
                    return;
                }
                self.shut_down(process, grace);
                lasts
            }
            Fault::StopServer { server, lasts } => {
                self.servers[server].stopped = true;
                lasts
            }
            Fault::RestartServer { server, lasts, loses_data } => {
                self.servers[server].down = true;
                self.servers[server].inbox.clear();
                if loses_data {
                    self.servers[server].queue = LockTable::new(EPOCH_MICROS, self.planted);
                    let micros = self.servers[server].clock.at(self.now).as_micros();
                    let tokens = (EPOCH_MICROS, EPOCH_MICROS + micros + 1_000);
                    let loss = DataLoss { at: self.now, tokens };
                    for key in (server..self.keys.len()).step_by(self.plan.servers) {
                        self.checker.data_loss(key, loss);
                        self.checker.data_loss(self.keys.len() + key, loss);
                    }
                }
                lasts
            }
        };
        self.report.faults += 1;
        self.active_faults += 1;
        self.after(lasts, Event::FaultEnds(fault));
    }

    pub(super) fn end(&mut self, fault: Fault) {
        self.active_faults -= 1;
        self.last_trouble = self.last_trouble.max(self.now);
        match fault {
            Fault::PauseProcess { process, .. } => {
                self.processes[process].paused = false;
                for event in std::mem::take(&mut self.processes[process].deferred) {
                    self.after(Duration::ZERO, event);
                }
            }
            Fault::KillProcess { process, .. } => self.replace_process(process),
            Fault::ShutDown { process, .. } => self.shutdown_over(process),
            Fault::StopServer { server, .. } => {
                self.servers[server].stopped = false;
                for event in std::mem::take(&mut self.servers[server].inbox) {
                    self.after(Duration::ZERO, event);
                }
            }
            Fault::RestartServer { server, .. } => self.servers[server].down = false,
        }
    }
}

pub(super) fn failed(request: &Request, kind: ErrorKind) -> Answer {
    match request {
        Request::Acquire(_) => Answer::Acquire(Err(Error::new(kind, Operation::Acquire))),
        Request::Renew(_) => Answer::Renew(Err(Error::new(kind, Operation::Renew))),
        Request::Release(..) => Answer::Release(Err(Error::new(kind, Operation::Release))),
    }
}
