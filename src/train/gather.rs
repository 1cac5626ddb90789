//! What workers tell each other beside the pipeline.
use crate::{Error, Result, pipeline::transport::Transport};
use serde::{Serialize, de::DeserializeOwned};

/// Gives every worker the values of all of them, in order of rank.
///
/// # Errors
/// If another worker fails.
pub fn gather<T: Serialize + DeserializeOwned>(transport: &mut dyn Transport, mine: &T) -> Result<Vec<T>> {
    let fault = |e: serde_json::Error| Error::transport(format!("gather: {e}"));
    let bytes = serde_json::to_vec(mine).map_err(fault)?;
    transport.all_gather(&bytes)?.iter().map(|b| serde_json::from_slice(b).map_err(fault)).collect()
}

/// Gives every worker what one of them knows, the first that gives `Some`; `None` if none does.
///
/// # Errors
/// If another worker fails.
pub fn share<T: Serialize + DeserializeOwned>(transport: &mut dyn Transport, mine: Option<T>) -> Result<Option<T>> {
    Ok(gather(transport, &mine)?.into_iter().flatten().next())
}
