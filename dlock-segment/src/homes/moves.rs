//! Moves between homes: begun, finished and made good, each step by one request.

use super::plan::{self, Move};
use super::{Collected, Homes, Seen};
use crate::error::{Error, Result};
use crate::store::{Answer, Request, View};

impl Homes {
    /// Finishes what is in transit between homes that can be reached, and makes good what a
    /// home forgot that went back. Returns whether there was anything to do: then what was
    /// collected is old.
    pub(super) async fn finish(&self, collected: &Collected) -> Result<bool> {
        let mut any = false;
        for (from, sender) in reached(collected) {
            for (to, receiver) in reached(collected) {
                let (sent, received) = (sender.sent[to], receiver.received[from].0);
                if sent > received {
                    any = true;
                    let received = self.receive(from, to, sent, &sender.view).await;
                    self.go_on_without(to, received)?;
                } else if received > sent {
                    // Either it was sent after the sender was looked at, and the counter is
                    // not as expected; or the sender lost it, and has these units twice.
                    let quantity = received - sent;
                    let again = self.send(from, to, quantity, sent).await;
                    let Some((total, _)) = self.go_on_without(from, again)? else {
                        any = true;
                        continue;
                    };
                    any |= total != sent;
                    if total == received {
                        tracing::warn!(
                            target: "dlock::inventory",
                            inventory = self.sites[0].id.key.label(), home = from, units = quantity,
                            "a home had lost that it sent units, and they were taken out again"
                        );
                    }
                }
            }
        }
        Ok(any)
    }

    /// Sends units, if `after` is all that was sent so far. Returns all that was sent.
    async fn send(&self, from: usize, to: usize, quantity: u64, after: u64) -> Result<(u64, View)> {
        let request = Request::Send { to: to as u32, quantity, after };
        let (view, answers) = self.sites[from].apply(vec![request]).await?;
        match answers[..] {
            [Answer::Moved { total, .. }] => Ok((total, view)),
            ref other => Err(Error::Conflict(format!("the store answered {other:?}"))),
        }
    }

    async fn receive(&self, from: usize, to: usize, total: u64, sender: &View) -> Result<()> {
        let request = Request::Receive { from: from as u32, total, seen: sender.changes };
        self.sites[to].apply(vec![request]).await.map(drop)
    }

    /// Moves units as planned. Returns whether any was moved.
    pub(super) async fn carry_out(&self, plan: &[Move], collected: &Collected) -> Result<bool> {
        let mut any = false;
        for &Move { from, to, units } in plan {
            let Ok(sender) = &collected[from] else { continue };
            let before = sender.sent[to];
            let sent = self.send(from, to, units, before).await;
            let Some((total, view)) = self.go_on_without(from, sent)? else { continue };
            if total > before {
                any = true;
                let received = self.receive(from, to, total, &view).await;
                self.go_on_without(to, received)?;
            }
        }
        Ok(any)
    }

    /// A home that did not answer is looked at with less patience from now on. `None`: what it
    /// was asked for may be done or not, and whoever looks at it next finishes it.
    fn go_on_without<T>(&self, home: usize, answered: Result<T>) -> Result<Option<T>> {
        match answered {
            Ok(answer) => Ok(Some(answer)),
            Err(error @ (Error::Store(_) | Error::Unknown(_))) => {
                self.note_away(home, &error);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Levels the homes, by the rate at which each sells. With `always`, all of them get
    /// their due; else only those that have less than half of it. Returns the moves.
    pub(crate) async fn level(&self, rates: &[f64], always: bool) -> Result<usize> {
        let mut collected = self.collect_near(false).await;
        if self.finish(&collected).await? {
            collected = self.collect_near(false).await;
        }
        self.spread_settings(&collected).await;
        let plan = plan::level(&available(&collected), rates, always);
        self.carry_out(&plan, &collected).await?;
        Ok(plan.len())
    }
}

/// The homes that answered.
pub(super) fn reached(collected: &Collected) -> impl Iterator<Item = (usize, &Seen)> {
    collected.iter().enumerate().filter_map(|(home, seen)| Some((home, seen.as_ref().ok()?)))
}

pub(super) fn available(collected: &Collected) -> Vec<Option<u64>> {
    collected.iter().map(|seen| seen.as_ref().ok().map(|seen| seen.view.available)).collect()
}
