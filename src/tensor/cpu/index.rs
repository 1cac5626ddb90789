//! Rows of a table by their ids.
use super::{Cpu, elementwise::GRAIN};
use crate::{
    Result,
    tensor::{
        View, ViewMut,
        reference::{ids, inside},
    },
};

pub(crate) fn embedding(cpu: &Cpu, table: View, at: View, mut y: ViewMut) -> Result<()> {
    let v = table.layout.shape()[0];
    let (at, table, y) = (ids(at)?, table.slice::<f32>()?, y.slice::<f32>()?);
    let d = y.len() / at.len().max(1);
    inside("embedding", &at, v)?;
    let rows = cpu.threads.piece(at.len(), 1, GRAIN / d.max(1));
    cpu.threads.over(at.chunks(rows).zip(y.chunks_mut((rows * d).max(1))), |(at, y)| {
        for (&id, y) in at.iter().zip(y.chunks_mut(d.max(1))) {
            y.copy_from_slice(&table[id as usize * d..][..d]);
        }
    });
    Ok(())
}

/// Each thread owns a part of the table and looks at all ids, so that a row's gradients are added in their order.
pub(crate) fn embedding_grad(cpu: &Cpu, at: View, dy: View, mut dtable: ViewMut) -> Result<()> {
    let v = dtable.layout.shape()[0];
    let (at, dy, dtable) = (ids(at)?, dy.slice::<f32>()?, dtable.slice::<f32>()?);
    inside("embedding_grad", &at, v)?;
    let d = (dy.len() / at.len().max(1)).max(1);
    let rows = cpu.threads.piece(dtable.len() / d, 1, GRAIN / d);
    cpu.threads.over(dtable.chunks_mut(rows * d).enumerate(), |(i, part)| {
        part.fill(0.0);
        for (&id, dy) in at.iter().zip(dy.chunks(d)) {
            let local = usize::try_from(id).ok().and_then(|id| id.checked_sub(i * rows)).filter(|r| r * d < part.len());
            if let Some(r) = local {
                part[r * d..][..d].iter_mut().zip(dy).for_each(|(t, dy)| *t += dy);
            }
        }
    });
    Ok(())
}
