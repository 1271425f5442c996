//! A home has too little: units are brought to it, or it is proven that there are none.

use super::moves::{available, reached};
use super::{Collected, Homes, Seen, plan, whole};
use crate::error::{Error, Result};
use crate::store::View;

/// How often units are looked for while the homes change.
const TRIES: usize = 16;

/// What was done for a home that has too little.
#[derive(Clone, Debug)]
pub(crate) enum Refilled {
    /// It may have enough now: the request can be sent again.
    Units,
    /// There was a moment at which all homes together had only this, and nothing was in
    /// transit.
    SoldOut(Box<View>),
}

impl Homes {
    /// Brings units to a home that has fewer than `quantity`, or proves that all homes
    /// together have fewer.
    ///
    /// # Errors
    /// [`Error::OutOfReach`] if the homes that can be reached have fewer, and others cannot be
    /// reached. [`Error::Store`] if the homes changed all the time.
    pub(crate) async fn refill(&self, to: usize, quantity: u64) -> Result<Refilled> {
        for round in 0..TRIES {
            // First without the homes that are slow: the others may have enough.
            let quickly = round == 0;
            let first = self.collect_near(quickly).await;
            if let Err(error) = &first[to] {
                if quickly {
                    continue;
                }
                return Err(error.clone());
            }
            self.spread_settings(&first).await;
            if self.may_finish() && self.finish(&first).await? {
                continue;
            }
            let has = available(&first);
            if has[to] >= Some(quantity) {
                return Ok(Refilled::Units);
            }
            let plan = plan::pull(&has, to, quantity);
            if !plan.is_empty() {
                if self.carry_out(&plan, &first).await? {
                    return Ok(Refilled::Units);
                }
                continue;
            }
            if quickly && out_of_reach(&first).is_some() {
                continue;
            }
            let second = self.collect_near(false).await;
            if let Some(error) = out_of_reach(&first).or_else(|| out_of_reach(&second)) {
                return Err(error);
            }
            if self.is_proven(&first, &second) {
                let views = first.iter().flatten().map(|seen| &seen.view);
                return Ok(Refilled::SoldOut(Box::new(whole(views))));
            }
        }
        Err(Error::Store(
            dlock::Error::new(dlock::ErrorKind::Unavailable, dlock::Operation::Inventory).with_message(
                "units move between the homes of the inventory all the time, so it is not known whether it is sold out; nothing was taken; try again",
            ),
        ))
    }

    /// Whether there was a moment between both at which the homes had no more than in the
    /// first, and nothing was in transit.
    fn is_proven(&self, first: &Collected, second: &Collected) -> bool {
        let unchanged = |one: &Seen, two: &Seen| {
            (one.view.inflow, &one.sent, &one.received)
                == (two.view.inflow, &two.sent, &two.received)
        };
        let all = |(one, two): (&Result<Seen>, &Result<Seen>)| match (one, two) {
            (Ok(one), Ok(two)) => unchanged(one, two),
            _ => false,
        };
        let none_in_transit = reached(first).all(|(from, sender)| {
            reached(first).all(|(to, receiver)| sender.sent[to] <= receiver.received[from].0)
        });
        first.iter().zip(second).all(all) && (none_in_transit || !self.may_finish())
    }

    /// Whether what is in transit is looked at; not with the planted bug.
    fn may_finish(&self) -> bool {
        #[cfg(test)]
        return !self.answers_in_transit;
        #[cfg(not(test))]
        true
    }
}

/// The error if a home cannot be reached, or is gone.
pub(crate) fn out_of_reach<T>(answers: &[Result<T>]) -> Option<Error> {
    let gone = answers.iter().filter_map(|answer| answer.as_ref().err());
    let mut gone = gone.filter(|error| !matches!(error, Error::Store(_) | Error::Unknown(_)));
    if let Some(error) = gone.next() {
        return Some(error.clone());
    }
    let away = (0..).zip(answers).filter(|(_, answer)| answer.is_err());
    let homes: Vec<u32> = away.map(|(home, _)| home).collect();
    (!homes.is_empty()).then_some(Error::OutOfReach { homes })
}
