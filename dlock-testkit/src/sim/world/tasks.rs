//! The tasks of the world: they ask, hold, write and let go.

use std::sync::Arc;
use std::time::Duration;

use dlock::backend::{Moment, Release};
use dlock::machine::Bug;
use dlock::machine::{Lane, LeaseStatus, LockRequest, Outcome, Refusal, Ticket, Wait};
use dlock::{Holder, LossReason, Mode, ReleaseOutcome};
use rand::RngExt as _;

use super::{CALM_HOLD, Doing, Event, LONGEST_WAIT, Seat, Task, TaskStep, World};

impl World {
    pub(super) fn task_step(&mut self, seat: Seat, step: TaskStep) {
        let Seat { process, task, .. } = seat;
        let current = &self.processes[process].tasks[task];
        if current.round != seat.round {
            return;
        }
        match (step, current.doing) {
            (TaskStep::Ask, Doing::Thinking) => self.ask(seat),
            (TaskStep::Cancel, Doing::Waiting) => self.let_go(seat),
            (TaskStep::Write, Doing::Holding) => self.write(seat),
            (TaskStep::Done, Doing::Holding) => self.done(seat),
            _ => {}
        }
    }

    fn is_marathon(&self, seat: Seat) -> bool {
        self.plan.marathon && seat.process == 0 && seat.task == 0
    }

    pub(super) fn ask(&mut self, seat: Seat) {
        if self.now >= self.plan.day_ends {
            return; // the day is over
        }
        let marathon = self.is_marathon(seat);
        let key =
            if marathon { self.plan.keys } else { self.random.random_range(0..self.plan.keys) };
        let mode = if marathon {
            Mode::Exclusive
        } else if self.chance(self.plan.permits) {
            Mode::Permits { count: self.random.random_range(1..=3), of: 3 }
        } else if self.chance(self.plan.shared) {
            Mode::Shared
        } else {
            Mode::Exclusive
        };
        let local = self.processes[seat.process].clock.at(self.now);
        let wait = if self.chance(self.plan.tries) {
            Wait::Try
        } else if self.chance(30) {
            Wait::Until(local + self.between(Duration::from_millis(1), Duration::from_secs(2)))
        } else {
            Wait::Until(Moment::NEVER)
        };
        let own = mode.is_permits() || self.chance(self.plan.fair);
        let max_hold = (!marathon && self.chance(5)).then(|| Duration::from_millis(30));
        let wanted = self.keys[key].clone();
        let ask = LockRequest {
            key: &wanted,
            mode,
            ttl: self.plan.ttl,
            wait,
            lane: if own { Lane::Separate } else { Lane::Shared },
            max_hold,
            holder: Arc::new(Holder {
                client: self.processes[seat.process].client,
                name: format!("p{}", seat.process),
                host: "sim".into(),
                pid: seat.life,
                tags: Vec::new(),
            }),
        };
        if self.chance(self.plan.cancels) {
            let after = self.between(Duration::ZERO, Duration::from_millis(50));
            self.after(after, Event::Task { seat, step: TaskStep::Cancel });
        }
        let now = self.now;
        let task = &mut self.processes[seat.process].tasks[seat.task];
        *task = Task {
            doing: Doing::Waiting,
            round: seat.round,
            ticket: None,
            key,
            mode,
            since: now,
            told_lost: false,
        };
        let server = self.server_of(key);
        let mut enqueued = None;
        self.step(seat.process, server, |machine, now, actions| {
            enqueued = machine.enqueue(now, ask, seat.task, actions).ok();
        });
        self.processes[seat.process].tasks[seat.task].ticket = enqueued;
        match enqueued {
            Some(ticket) => self.wake(seat.process, server, ticket),
            None => self.think(seat),
        }
    }

    /// Something changed for a ticket.
    pub(super) fn wake(&mut self, process: usize, server: usize, ticket: Ticket) {
        let machine = &mut self.processes[process].machines[server];
        let Some(task) = machine.payload_mut(ticket).copied() else { return };
        let current = &self.processes[process].tasks[task];
        if current.ticket != Some(ticket) {
            return;
        }
        let (doing, key, mode) = (current.doing, current.key, current.mode);
        let seat = Seat { process, life: self.processes[process].life, task, round: current.round };
        let machine = &mut self.processes[process].machines[server];
        match doing {
            Doing::Waiting => match machine.outcome(ticket) {
                Outcome::Waiting => {}
                Outcome::Refused(refusal) => self.refused(seat, &refusal),
                Outcome::Admitted { token, handed_over, .. } => {
                    self.admitted(seat, key, mode, token, handed_over);
                }
            },
            Doing::Holding => {
                let local = self.processes[process].clock.at(self.now);
                let standing = self.processes[process].machines[server].status(local, ticket);
                if let LeaseStatus::Lost(LossReason::Deadline) = standing {
                    self.judge_loss(seat, key);
                    self.processes[process].tasks[task].told_lost = true;
                }
                // Half of the bodies stop when the lock is lost, half go on.
                if let LeaseStatus::Lost(_) = standing
                    && self.chance(50)
                {
                    self.let_go(seat);
                }
            }
            Doing::Releasing => {
                if let Some(outcome) = machine.released(ticket) {
                    if let Ok(ReleaseOutcome::Released) | Err(_) = outcome {
                        self.log(|| format!("{seat:?} released"));
                    }
                    self.think(seat);
                }
            }
            Doing::Thinking => {}
        }
    }

    fn refused(&mut self, seat: Seat, refusal: &Refusal) {
        self.log(|| format!("{seat:?} refused: {refusal:?}"));
        if let Refusal::Failed(error) | Refusal::TimedOut { trouble: Some(error), .. } = refusal
            && !error.kind().is_retryable()
        {
            self.checker.violated(|| format!("I6: {error}"));
        }
        self.think(seat);
    }

    fn admitted(&mut self, seat: Seat, key: usize, mode: Mode, token: u64, handed_over: bool) {
        self.log(|| format!("{seat:?} admitted to k{key} {mode:?} token {token} {handed_over}"));
        self.report.admissions += 1;
        self.report.handovers += u64::from(handed_over);
        let history = self.history_of(key, mode);
        let (now, lease) = (self.now, self.longest_lease());
        let task = &mut self.processes[seat.process].tasks[seat.task];
        task.doing = Doing::Holding;
        let waited = now - task.since;
        task.since = now;
        self.judge_wait(seat, key, waited);
        self.checker.admitted(history, seat, mode, token, now, lease);
        if let Some(since) = self.free_since.get_mut(key) {
            *since = None; // it went on, however free it was whenever one looked
        }
        self.judge(history);
        if handed_over {
            self.judge_handover(seat, key);
        }
        let hold = if self.is_marathon(seat) {
            self.plan.day_ends.saturating_sub(self.now)
        } else if self.is_faulty() && self.chance(self.plan.long_holds) {
            self.between(Duration::ZERO, self.plan.ttl.min(Duration::from_secs(1)) * 2)
        } else if self.is_faulty() {
            self.between(Duration::ZERO, self.plan.longest_hold)
        } else {
            self.between(Duration::ZERO, CALM_HOLD)
        };
        self.after(hold, Event::Task { seat, step: TaskStep::Done });
        let half_way = hold.mul_f64(self.random.random_range(0.0..1.0));
        self.after(half_way, Event::Task { seat, step: TaskStep::Write });
    }

    fn standing(&self, seat: Seat, key: usize) -> Option<(LeaseStatus, Moment)> {
        let process = &self.processes[seat.process];
        let ticket = process.tasks[seat.task].ticket?;
        let local = process.clock.at(self.now);
        Some((process.machines[self.server_of(key)].status(local, ticket), local))
    }

    fn judge_handover(&mut self, seat: Seat, key: usize) {
        let half = self.plan.ttl.min(Duration::from_secs(3)).mul_f64(0.45);
        if let Some((LeaseStatus::Held { until, .. }, local)) = self.standing(seat, key)
            && until.since(local) < half
            && until.since(local) > Duration::from_millis(30)
        // not just max_hold
        {
            self.checker.violated(|| {
                format!("I4: k{key} was handed over to {seat:?} with little of its term left")
            });
        }
    }

    /// A lock was lost by its deadline: was there a reason?
    fn judge_loss(&mut self, seat: Seat, key: usize) {
        let excuse = self.plan.ttl / 2 + 3 * self.plan.call_timeout;
        if self.now > self.troubled + excuse && self.faults_on == 0 {
            self.checker.violated(|| {
                format!("I4: {seat:?} lost k{key}, though nothing kept it from being renewed")
            });
        }
    }

    fn judge_wait(&mut self, seat: Seat, key: usize, waited: Duration) {
        let calm = self.now.saturating_sub(self.plan.settled);
        if waited.min(calm) > LONGEST_WAIT {
            self.checker.violated(|| format!("I4: {seat:?} waited {waited:?} for k{key}"));
        }
    }

    fn write(&mut self, seat: Seat) {
        let task = self.processes[seat.process].tasks[seat.task].clone();
        let standing = self.standing(seat, task.key);
        let held = matches!(standing, Some((LeaseStatus::Held { .. }, _)));
        let history = self.history_of(task.key, task.mode);
        let unfenced = self.plant == Some(Bug::UnfencedWrite);
        let (now, lease) = (self.now, self.longest_lease());
        self.checker.write(history, seat, held, unfenced, now, lease);
    }

    fn done(&mut self, seat: Seat) {
        self.write(seat);
        let key = self.processes[seat.process].tasks[seat.task].key;
        if let Some((LeaseStatus::Lost(LossReason::Deadline), _)) = self.standing(seat, key)
            && !self.processes[seat.process].tasks[seat.task].told_lost
        {
            self.judge_loss(seat, key);
        }
        let task = self.processes[seat.process].tasks[seat.task].clone();
        let Some(ticket) = task.ticket else { return };
        let server = self.server_of(task.key);
        if task.mode == Mode::Exclusive && self.chance(self.plan.downgrades) {
            self.checker.downgraded(task.key, seat, 0); // readers may come in with it
            let token = self.step(seat.process, server, |machine, now, actions| {
                machine.downgrade(now, ticket, actions)
            });
            if let Some(token) = token {
                self.processes[seat.process].tasks[seat.task].mode = Mode::Shared;
                self.checker.downgraded(task.key, seat, token);
                self.judge(task.key);
                let more = self.between(Duration::ZERO, self.plan.longest_hold);
                return self.after(more, Event::Task { seat, step: TaskStep::Done });
            }
        }
        if self.chance(50) {
            return self.let_go(seat);
        }
        let history = self.history_of(task.key, task.mode);
        self.checker.left(history, seat);
        self.processes[seat.process].tasks[seat.task].doing = Doing::Releasing;
        // Nobody is told when such a key is free: then waits are longer than in calm.
        let how = if task.mode != Mode::Shared && self.is_faulty() && self.chance(10) {
            Release::After(self.between(Duration::from_millis(1), Duration::from_millis(50)))
        } else {
            Release::Now
        };
        self.step(seat.process, server, |machine, now, actions| {
            machine.release(now, ticket, how, actions);
        });
    }

    /// Drops a future or a guard.
    fn let_go(&mut self, seat: Seat) {
        let task = self.processes[seat.process].tasks[seat.task].clone();
        let history = self.history_of(task.key, task.mode);
        self.checker.left(history, seat);
        self.think(seat);
        if let Some(ticket) = task.ticket {
            let server = self.server_of(task.key);
            self.step(seat.process, server, |machine, now, actions| {
                machine.forget(now, ticket, actions);
            });
        }
    }

    fn think(&mut self, seat: Seat) {
        let task = &mut self.processes[seat.process].tasks[seat.task];
        task.doing = Doing::Thinking;
        task.round += 1;
        task.ticket = None;
        let seat = Seat { round: task.round, ..seat };
        let think = self.between(Duration::ZERO, self.plan.longest_think);
        self.after(think, Event::Task { seat, step: TaskStep::Ask });
    }
}
