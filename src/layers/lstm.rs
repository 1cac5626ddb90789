//! Long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).
use super::{Example, Init, Layer, ParamSpec, positive};
use crate::{
    Error, Result,
    autograd::{Cx, Outputs, Var},
};

/// One layer over the sequence `x[n,t,inputs]`: `y[n,t,hidden]`, and the state `h[n,hidden]` and `c[n,hidden]` after the last
/// token. It starts with zeros, or with the state that follows x as its second and third input.
#[derive(Clone, Copy, Debug)]
pub struct Lstm {
    inputs: usize,
    hidden: usize,
    frozen: bool,
}

impl Lstm {
    /// From `inputs` features to `hidden` units.
    pub fn new(inputs: usize, hidden: usize) -> Lstm {
        Lstm { inputs, hidden, frozen: false }
    }

    /// Its parameters are not learned.
    pub fn frozen(self) -> Lstm {
        Lstm { frozen: true, ..self }
    }
}

impl Layer for Lstm {
    fn kind(&self) -> &'static str {
        "lstm"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let (gates, init) = (self.hidden.saturating_mul(4), Init::fan_in(self.hidden));
        let param = |name, shape: &[usize]| ParamSpec::new(name, shape, init).frozen(self.frozen);
        vec![
            param("weight_ih", &[gates, self.inputs]),
            param("weight_hh", &[gates, self.hidden]),
            param("bias_ih", &[gates]),
            param("bias_hh", &[gates]),
        ]
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let (inputs, d) = (self.inputs, self.hidden);
        positive("lstm", &[("inputs", inputs), ("hidden", d)])?;
        let (x, start) = match x {
            [x] => (x, None),
            [x, h, c] => (x, Some([h, c])),
            _ => {
                let n = x.len();
                return Err(Error::graph(format!("lstm: x, or x and the state h and c expected, got {n} inputs")));
            }
        };
        let &[n, t, features] = x.shape() else {
            return Err(Error::shape(format!("lstm: x[n,t,{inputs}] expected, got {:?}", x.shape())));
        };
        if features != inputs || t == 0 {
            let got = x.shape();
            return Err(Error::shape(format!("lstm: x[n,t,{inputs}] of one token or more expected, got {got:?}")));
        }
        if let Some(s) = start.iter().flatten().find(|s| s.shape() != [n, d]) {
            return Err(Error::shape(format!("lstm: a state [{n},{d}] expected, got {:?}", s.shape())));
        }
        let params = [cx.param(0)?, cx.param(1)?, cx.param(2)?, cx.param(3)?];
        cx.lstm(x, params.each_ref(), start)
    }

    fn examples() -> Vec<Example> {
        let state = |name, layer, [n, t, i, d]: [usize; 4]| Example::new(name, layer, &[&[n, t, i], &[n, d], &[n, d]]);
        vec![
            Example::new("sequence", Lstm::new(3, 4), &[&[2, 5, 3]]),
            Example::new("one token", Lstm::new(2, 3), &[&[3, 1, 2]]),
            Example::new("one unit", Lstm::new(1, 1), &[&[1, 3, 1]]),
            state("with a state", Lstm::new(3, 2), [2, 4, 3, 2]),
            state("one token with a state, frozen", Lstm::new(2, 2).frozen(), [1, 1, 2, 2]),
        ]
    }
}
