//! Where the answers of calls go.

use tokio::sync::oneshot;

use crate::backend::Batch;
use crate::claim::Answer;

/// A batch of the driver, or a task that waits.
pub(super) enum AnswerSink {
    Batch(Box<dyn Batch>),
    Channel(oneshot::Sender<Vec<Answer>>),
}

impl AnswerSink {
    pub(super) fn send(self, answers: Vec<Answer>) {
        match self {
            AnswerSink::Batch(batch) => batch.complete(answers),
            AnswerSink::Channel(channel) => drop(channel.send(answers)), // it may have been given up
        }
    }
}
