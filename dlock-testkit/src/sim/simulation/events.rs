//! The events of a simulation: what happens at which time, and who does it.

use std::cmp::Reverse;
use std::time::Duration;

use dlock::ErrorKind;
use dlock::backend::{Answer, Notice, Owner, Request};
use dlock::machine::{CallId, Engine};

use super::super::plan::Fault;
use super::network::failed;
use super::{Simulation, TaskRun};

#[derive(Clone, Debug)]
pub(super) enum Event {
    /// A timer of a machine is due.
    Tick {
        process: usize,
        incarnation: u32,
        server: usize,
    },
    /// A task takes its next step.
    Task {
        run: TaskRun,
        step: TaskStep,
    },
    /// A request reaches its server.
    Request {
        process: usize,
        incarnation: u32,
        server: usize,
        call: CallId,
        request: Box<Request>,
    },
    /// An answer reaches its process.
    Answer {
        process: usize,
        incarnation: u32,
        server: usize,
        call: CallId,
        answer: Box<Answer>,
    },
    /// A call was not answered in time.
    TimeOut {
        process: usize,
        incarnation: u32,
        server: usize,
        call: CallId,
    },
    /// A notice reaches its process.
    Notice {
        client: u64,
        server: usize,
        owner: Owner,
        notice: Notice,
    },
    /// An operator breaks a key.
    Break {
        key: usize,
    },
    /// The delay of a break is over: these had the lock when it was broken.
    BreakOver {
        key: usize,
        holders: Vec<TaskRun>,
    },
    /// The grace of a shutdown is over.
    GraceOver {
        process: usize,
        incarnation: u32,
    },
    Fault(Fault),
    FaultEnds(Fault),
    CheckProgress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskStep {
    Ask,
    Cancel,
    Write,
    Done,
}

impl Simulation {
    pub(super) fn at(&mut self, at: Duration, event: Event) {
        self.seq += 1;
        self.events.push(Reverse((at, self.seq, ())));
        self.scheduled.insert(self.seq, event);
    }

    pub(super) fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    pub(super) fn handle(&mut self, event: Event) {
        if let Some((process, incarnation)) = self.recipient(&event) {
            let recipient = &mut self.processes[process];
            if !recipient.alive
                || incarnation.is_some_and(|incarnation| incarnation != recipient.incarnation)
            {
                return;
            }
            if recipient.paused {
                recipient.deferred.push_back(event);
                return;
            }
        }
        match event {
            Event::Tick { process, server, .. } => {
                if self.processes[process].ticks[server] <= self.now {
                    self.processes[process].ticks[server] = Duration::MAX;
                }
                self.step(process, server, Engine::tick);
                self.check_server(server);
            }
            Event::Task { run, step } => self.task_step(run, step),
            Event::Request { process, incarnation, server, call, request } => {
                if self.servers[server].down {
                    return; // lost with the connection
                }
                if self.servers[server].stopped {
                    let event = Event::Request { process, incarnation, server, call, request };
                    return self.servers[server].inbox.push_back(event);
                }
                self.serve(process, incarnation, server, call, &request);
            }
            Event::Answer { process, server, call, answer, .. } => {
                self.answered(process, server, call, *answer);
            }
            Event::TimeOut { process, server, call, .. } => {
                if let Some(request) = self.processes[process].unanswered[server].get(&call) {
                    let answer = failed(request, ErrorKind::Unknown);
                    self.answered(process, server, call, answer);
                }
            }
            Event::Notice { client, server, owner, notice } => {
                let process = self.processes.iter().position(|process| process.client == client);
                let Some(process) = process else { return };
                self.step(process, server, |machine, now, actions| {
                    machine.notice(now, owner, notice, actions);
                });
                self.check_server(server);
            }
            Event::Break { key } => self.break_key(key),
            Event::BreakOver { key, holders } => self.check_broken(key, &holders),
            Event::GraceOver { process, .. } => self.grace_over(process),
            Event::Fault(fault) => self.begin(fault),
            Event::FaultEnds(fault) => self.end(fault),
            Event::CheckProgress => self.check_progress(),
        }
    }

    /// The process that an event is for, and its incarnation if that matters.
    fn recipient(&self, event: &Event) -> Option<(usize, Option<u32>)> {
        match event {
            Event::Tick { process, incarnation, .. }
            | Event::Answer { process, incarnation, .. }
            | Event::GraceOver { process, incarnation }
            | Event::TimeOut { process, incarnation, .. } => Some((*process, Some(*incarnation))),
            Event::Task { run, .. } => Some((run.process, Some(run.incarnation))),
            Event::Notice { client, .. } => {
                let process =
                    self.processes.iter().position(|process| process.client == *client)?;
                Some((process, None))
            }
            _ => None,
        }
    }
}
